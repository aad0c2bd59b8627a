"""All of SAGE's experiments: what is simulated, under which assumptions, and what comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean

from cache_manager import exits
from research.sage.exit_curves import (
    FIXED_S,
    SAGE_S,
    WORTHS_GIB_S,
    ExitCurves,
    curves,
    together,
)
from research.sage.gpu_functions import Assumptions
from research.sage.gpu_systems import (
    DGSF,
    DGSF_LEAVING,
    DGSF_OF_TWO,
    FIXED_GSL,
    FIXED_GSL_F,
    SAGE,
    SAGE_NR,
    run_node,
)
from research.sage.idle_walk import IdleCosts, TraceWindow, costs_of, ten_windows
from research.sage.node_figures import RatiosToSage, SystemFigures, figures, ratios
from research.sage.printed_numbers import sage_paper
from research.sage.system_study import (
    CHOSEN,
    THE_FOUR,
    PeakFigures,
    SageSetting,
    calls_of_table4,
    compare,
    parallel_setup_saves,
    peaks,
)
from scheduler.sim.workload import MINUTE_S

# Only these suffer under the contention that the grid varies.
_CONTENDED = (FIXED_GSL, FIXED_GSL_F)
# Exit rules that run in the whole simulator.
RULES = ("fixed", "adaptive", "adaptive:500", "never")
Announce = Callable[[str], None]
SAGE_STEPS = 7  # that `evaluate` announces


@dataclass(frozen=True, slots=True)
class SagePlan:
    """How much is simulated; the least that makes a page is a plan of short runs."""

    setting: SageSetting
    loads: Sequence[float]
    contentions: Sequence[float]
    variants: Mapping[str, SageSetting]
    windows: Sequence[TraceWindow]
    regular_windows: Sequence[TraceWindow]
    fixed_s: Sequence[float] = FIXED_S
    worths: Sequence[float] = WORTHS_GIB_S


@dataclass(frozen=True, slots=True)
class GridPoint:
    """SAGE's three rivals over SAGE at one load and one contention, and the distance from print."""

    load: float
    contention: float
    ratios: Mapping[str, RatiosToSage]

    @property
    def distance(self) -> float:
        """By which factor the fifteen ratios differ from the printed ones, on average."""
        return apart(self.ratios)


@dataclass(frozen=True, slots=True)
class ExitStudy:
    """Exit rules over windows of the trace, and the share of calls that find anything at all."""

    windows: tuple[ExitCurves, ...]
    regular: tuple[ExitCurves, ...]
    context_only: IdleCosts
    default: IdleCosts
    on_machine: Mapping[str, SystemFigures]

    @property
    def all(self) -> ExitCurves:
        return together(self.windows)

    @property
    def regular_all(self) -> ExitCurves:
        return together(self.regular)

    @property
    def found_percent(self) -> float:
        """Calls that find their function in one of SAGE's stages."""
        sage = self.all.sage
        return 100.0 * (1.0 - sage.gone / sage.calls)


@dataclass(frozen=True, slots=True)
class SageEvaluation:
    """Everything that the page shows."""

    plan: SagePlan
    table4_s: Mapping[str, float]
    main: Mapping[str, SystemFigures]
    thirty: Mapping[str, SystemFigures]
    four: Mapping[str, SystemFigures]
    peaks: Mapping[str, Sequence[PeakFigures]]
    peaks_by_contention: Mapping[float, Mapping[str, float]]
    parallel_saves: float
    grid: Sequence[GridPoint]
    variants: Mapping[str, tuple[Mapping[str, SystemFigures], Mapping[str, float]]]
    exits: ExitStudy


def default_sage_plan() -> SagePlan:
    """The plan of the page."""
    return SagePlan(
        setting=CHOSEN,
        loads=(0.8, 0.9, 0.95, 0.98, 1.0, 1.02),
        contentions=(0.0, 0.02, 0.05, 0.1, 0.16, 0.25),
        variants=variants(CHOSEN),
        windows=ten_windows(),
        regular_windows=ten_windows(regular=True),
    )


def variants(chosen: SageSetting) -> Mapping[str, SageSetting]:
    """The chosen setting, and what else SAGE's text allows, one difference at a time."""
    assumed = chosen.assumed

    def other(**changes: float) -> SageSetting:
        return replace(chosen, assumed=replace(assumed, **changes))  # type: ignore[arg-type]  # one is an int

    return {
        "as chosen": chosen,
        "other random arrivals": replace(chosen, seed=2),
        "30 minutes in place of two hours": replace(chosen, minutes=min(30, chosen.minutes)),
        "calls in the trace's proportions, bert most": replace(chosen, even=False),
        "calls in the trace's proportions, mrif most": replace(chosen, even=False, turned=2),
        "loading goes by size alone": other(request_ms=0.0),
        "the nine compute as long as resnet50": other(equal_compute_ms=24.3),
        "the nine compute for 6 % of a solo call": other(compute_share=0.06),
        "the nine compute for 25 % of a solo call": other(compute_share=0.25),
        "DGSF's servers suffer contention too": other(api_contention=assumed.contention),
        "SAGE's daemon suffers contention too": other(daemon_contention=assumed.contention),
        "SAGE has any number of calls on the GPU": other(calls_at_once=1_000_000),
        "SAGE has ten calls on the GPU": other(calls_at_once=10),
    }


def evaluate(plan: SagePlan, announce: Announce) -> SageEvaluation:
    """Simulate the plan; `announce` hears what comes next."""
    announce("SAGE's five systems")
    chosen, assumed = plan.setting, plan.setting.assumed
    main = compare(chosen, (FIXED_GSL, FIXED_GSL_F, DGSF, DGSF_LEAVING, SAGE_NR, SAGE))
    announce("30 functions")
    thirty = compare(replace(chosen, copies=3), (FIXED_GSL, DGSF_OF_TWO, SAGE))
    announce("four GPUs")
    four = compare(replace(chosen, gpus=4), (FIXED_GSL, DGSF, SAGE))
    announce("peaks")
    at_peak = {system.name: peaks(system, assumed) for system in (FIXED_GSL, SAGE)}
    announce("loads and contention")
    grid = [point for load in plan.loads for point in _at_load(plan, load)]
    announce("other assumptions")
    varied = {
        label: (compare(setting), peak_figures(setting.assumed))
        for label, setting in plan.variants.items()
    }
    announce("exit rules")
    return SageEvaluation(
        plan=plan,
        table4_s=calls_of_table4(),
        main=main,
        thirty=thirty,
        four=four,
        peaks=at_peak,
        peaks_by_contention={
            each: peak_figures(replace(assumed, contention=each)) for each in plan.contentions
        },
        parallel_saves=parallel_setup_saves(assumed),
        grid=grid,
        variants=varied,
        exits=_exits(plan),
    )


def peak_figures(assumed: Assumptions) -> Mapping[str, float]:
    """The means over the ten functions at peak, by the headline's key, and in its unit."""
    fixed, sage = peaks(FIXED_GSL, assumed), peaks(SAGE, assumed)
    return means_at_peak({FIXED_GSL.name: fixed, SAGE.name: sage})


def means_at_peak(found: Mapping[str, Sequence[PeakFigures]]) -> Mapping[str, float]:
    """The same from figures that were simulated before."""
    fixed, sage = found[FIXED_GSL.name], found[SAGE.name]
    return {
        "theory FixedGSL": 100.0 * fmean(each.of_theory for each in fixed),
        "theory SAGE": 100.0 * fmean(each.of_theory for each in sage),
        "loading": fmean(each.loading for each in fixed),
        "setup at peak": 100.0 * (1.0 - fmean(each.setup for each in sage)),
    }


def apart(found: Mapping[str, RatiosToSage]) -> float:
    """By which factor these ratios differ from the printed ones, on average."""
    printed = {headline.key: headline.value for headline in sage_paper().headlines}
    factors = [
        abs(log(ours / printed[f"{metric} {name}"]))
        for name, each in found.items()
        for metric, ours in by_metric(each).items()
    ]
    return exp(fmean(factors))


def by_metric(found: RatiosToSage) -> Mapping[str, float]:
    """A system's five ratios, by what the headlines call them."""
    return {
        "mean": found.mean,
        "least": found.least,
        "p99": found.p99,
        "throughput": found.throughput,
        "memory": found.memory_percent,
    }


def over_sage(found: Mapping[str, SystemFigures]) -> Mapping[str, RatiosToSage]:
    """Every other system beside SAGE."""
    return {
        name: ratios(each, found[SAGE.name]) for name, each in found.items() if name != SAGE.name
    }


def _at_load(plan: SagePlan, load: float) -> list[GridPoint]:
    points: list[GridPoint] = []
    found: dict[str, SystemFigures] = {}
    for contention in plan.contentions:
        assumed = replace(plan.setting.assumed, contention=contention)
        setting = replace(plan.setting, load=load, assumed=assumed)
        found |= compare(setting, _CONTENDED if found else THE_FOUR)
        points.append(GridPoint(load, contention, over_sage(found)))
    return points


def _exits(plan: SagePlan) -> ExitStudy:
    functions = plan.setting.functions()
    windows, regular = (
        tuple(curves(each, functions, plan.fixed_s, plan.worths) for each in group)
        for group in (plan.windows, plan.regular_windows)
    )
    idle = [each for window in plan.windows for each in window.idle_times(functions, 1)]
    context_only = exits.make(f"fixed:0,{2 * SAGE_S},{SAGE_S},{SAGE_S}")
    return ExitStudy(
        windows,
        regular,
        costs_of(context_only, idle),
        costs_of(exits.make("adaptive"), idle),
        {rule: _on_machine(plan, rule) for rule in RULES},
    )


def _on_machine(plan: SagePlan, rule: str) -> SystemFigures:
    """SAGE with this exit rule, each window's functions on a GPU of their own."""
    system = replace(SAGE, exit_rule=rule)
    runs = []
    for window in plan.windows:
        called = window.calls(plan.setting.functions(), 1)
        times = sorted((at_s, number) for number, each in enumerate(called) for at_s in each.at_s)
        functions = [
            replace(each.function, name=f"{each.function.name}{number}")
            for number, each in enumerate(called)
        ]
        period_s = window.minutes * MINUTE_S
        runs.append(run_node(system, functions, times, plan.setting.assumed, period_s))
    return figures(runs, sum(window.minutes for window in plan.windows) * MINUTE_S)
