"""All of ESG's experiments: what is simulated, under which assumptions, and what comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from research.esg.adaptive_planners import (
    EsgPlanner,
    EsgReading,
    FastGSharePlanner,
    InflessPlanner,
)
from research.esg.applications import BRANCHING, Application
from research.esg.cost_to_go_planner import CostToGoPlanner
from research.esg.fitted_profiles import EsgAssumptions, GpuScaling
from research.esg.lane_plans import LanePlanner
from research.esg.preplanned import AquatopePlanner, OrionPlanner
from research.esg.printed import LoadLevel, esg_paper
from research.esg.search_costs import SearchStudy, search_study
from research.esg.workflow_figures import WorkflowFigures, workflow_figures
from research.esg.workflow_run import WorkflowRun, calls_of

Announce = Callable[[str], None]
ESG_STEPS = 7  # that `evaluate_esg` announces
MakePlanner = Callable[[EsgAssumptions], LanePlanner]
ESG, OURS = "ESG", "cost-to-go"
ORION, AQUATOPE, INFLESS, FAST = "Orion", "Aquatope", "INFless", "FaST-GShare"
SYSTEMS: Mapping[str, MakePlanner] = {
    ESG: EsgPlanner,
    INFLESS: InflessPlanner,
    FAST: FastGSharePlanner,
    ORION: OrionPlanner,
    AQUATOPE: AquatopePlanner,
    OURS: CostToGoPlanner,
}
IN_A_ROW = "ESG, stages in a row"
STRICT, HEAVY = "strict-light", "relaxed-heavy"
# Of these, many seeds are compared one by one.
PAIR = (ESG, OURS)
_VARIED = (ESG, INFLESS, FAST, ORION, OURS)
_KEPT = (1, 2, 5, 20, 80)
_CUT_OFFS_MS = (1.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True, slots=True)
class EsgPlan:
    """How much is simulated; the least that makes a page is a plan of few short runs."""

    assumed: EsgAssumptions
    scalings: Sequence[GpuScaling]
    calls: int
    seeds: int
    pair_seeds: int
    variants: Mapping[str, EsgAssumptions]
    variant_seeds: int
    loads: Sequence[float]
    searched: int | None = None

    def of(self, scaling: GpuScaling) -> EsgAssumptions:
        """The assumptions with this scaling."""
        return replace(self.assumed, scaling=scaling)


BySystem = Mapping[str, WorkflowFigures]


@dataclass(frozen=True, slots=True)
class EsgEvaluation:
    """Everything that the page shows: `main` by scaling, level and system."""

    plan: EsgPlan
    main: Mapping[GpuScaling, Mapping[str, BySystem]]
    cut_offs: Mapping[float, tuple[WorkflowFigures, WorkflowFigures]]
    kept: Mapping[int, WorkflowFigures]
    ablation: BySystem
    readings: Mapping[str, tuple[WorkflowFigures, WorkflowFigures]]
    variants: Mapping[str, Mapping[str, BySystem]]
    loads: Mapping[GpuScaling, Mapping[float, BySystem]]
    branching: Mapping[str, BySystem]
    search: SearchStudy


def default_esg_plan() -> EsgPlan:
    """The plan of the page."""
    chosen = EsgAssumptions()
    return EsgPlan(
        assumed=chosen,
        scalings=tuple(GpuScaling),
        calls=1000,
        seeds=3,
        pair_seeds=20,
        variants=esg_variants(chosen),
        variant_seeds=1,
        loads=(1.0, 0.9, 0.8),
    )


def esg_variants(chosen: EsgAssumptions) -> Mapping[str, EsgAssumptions]:
    """The chosen assumptions, and others, one difference at a time."""

    def other(**changes: float) -> EsgAssumptions:
        return replace(chosen, **changes)  # type: ignore[arg-type]  # some are int

    return {
        "as chosen": chosen,
        "no noise": other(noise=0.0),
        "noise of 10 %": other(noise=0.1),
        "transfers between nodes cost a tenth": other(remote_ms=2.0, remote_mb_s=500.0),
        "transfers between nodes cost twice as much": other(remote_ms=40.0, remote_mb_s=25.0),
        "CPU work is 30 % of a run": other(cpu_share=0.3),
        "CPU work is 50 % of a run": other(cpu_share=0.5),
        "80 % of the GPU work does not grow with the batch": other(gpu_fixed=0.8),
        "20 % of the GPU work does not grow with the batch": other(gpu_fixed=0.2),
        "one warm instance a function and node": other(warm=1),
        "three warm instances a function and node": other(warm=3),
        "the least configuration after 10 rounds": other(rounds=10),
        "ESG searches for 10 ms": other(search_ms=10.0),
        "Orion looks at ten times as many states": other(states_a_ms=200.0),
    }


def esg_readings() -> Mapping[str, EsgReading]:
    """How else ESG can be read, one difference at a time."""
    chosen = EsgReading()
    return {
        "as chosen": chosen,
        "no margin for noise": replace(chosen, margin=0.0),
        "margin of one deviation": replace(chosen, margin=1.0),
        "margin of two deviations": replace(chosen, margin=2.0),
        "too late: the cheapest path, not the fastest": replace(chosen, cheapest_when_late=True),
        "quota of the whole time, as printed": replace(chosen, quota_as_printed=True),
        "later stages may take any batch": replace(chosen, later_batches=False),
        "groups of one": replace(chosen, group_size=1),
        "groups of two": replace(chosen, group_size=2),
    }


def simulate_esg(
    make: MakePlanner,
    assumed: EsgAssumptions,
    level: LoadLevel,
    calls: int,
    seeds: int,
    applications: Sequence[Application] = (),
) -> WorkflowFigures:
    """One system in one setting, over seeds 1 to `seeds`; ESG's applications without others."""
    runs = []
    for seed in range(1, seeds + 1):
        run = WorkflowRun(make(assumed), assumed, seed)
        run.run(calls_of(level, calls, seed, applications))
        runs.append(run)
    return workflow_figures(runs)


def evaluate_esg(plan: EsgPlan, announce: Announce) -> EsgEvaluation:
    """Simulate the plan; `announce` hears what comes next."""
    announce("the systems in three settings")
    main = {scaling: _settings(plan, scaling) for scaling in plan.scalings}
    announce("heavier loads")
    loads = {scaling: _loads(plan, scaling) for scaling in plan.scalings}
    announce("Orion's cut-offs, ESG's K, ESG without sharing or batches")
    cut_offs = {cut_off: _cut_off(plan, cut_off) for cut_off in _CUT_OFFS_MS}
    kept = {each: _esg(plan, EsgReading(kept=each), STRICT) for each in _KEPT}
    ablation = {
        "ESG": _esg(plan, EsgReading(), HEAVY),
        "one call at a time": _esg(plan, EsgReading(single_calls=True), HEAVY),
        "whole GPUs": _esg(plan, EsgReading(whole_gpus=True), HEAVY),
    }
    announce("other readings")
    readings = {
        label: (_esg(plan, reading, STRICT), _esg(plan, reading, HEAVY))
        for label, reading in esg_readings().items()
    }
    announce("other assumptions")
    variants = {label: _variant(plan, assumed) for label, assumed in plan.variants.items()}
    announce("applications with branches")
    branching = _branching(plan)
    announce("search times")
    return EsgEvaluation(
        plan=plan,
        main=main,
        cut_offs=cut_offs,
        kept=kept,
        ablation=ablation,
        readings=readings,
        variants=variants,
        loads=loads,
        branching=branching,
        search=search_study(plan.assumed, plan.searched),
    )


def _settings(plan: EsgPlan, scaling: GpuScaling) -> Mapping[str, BySystem]:
    return {
        level.name: {
            name: simulate_esg(
                make,
                plan.of(scaling),
                level,
                plan.calls,
                plan.pair_seeds if name in PAIR else plan.seeds,
            )
            for name, make in SYSTEMS.items()
        }
        for level in esg_paper().levels
    }


def _loads(plan: EsgPlan, scaling: GpuScaling) -> Mapping[float, BySystem]:
    """Relaxed-heavy with intervals cut short; our rule also without its price of scarcity."""
    heavy = esg_paper().level(HEAVY)
    systems: Mapping[str, MakePlanner] = {
        **{name: make for name, make in SYSTEMS.items() if name in PAIR},
        "cost-to-go, list prices": lambda assumed: CostToGoPlanner(assumed, scarcity=False),
        "cost-to-go, waits for calls": lambda assumed: CostToGoPlanner(assumed, waits=True),
    }
    return {
        factor: {
            name: simulate_esg(
                make, plan.of(scaling), _at_intervals(heavy, factor), plan.calls, plan.variant_seeds
            )
            for name, make in systems.items()
        }
        for factor in plan.loads
    }


def _branching(plan: EsgPlan) -> Mapping[str, BySystem]:
    """Our applications with branches; ESG also with its time divided as for stages in a row.

    They come less often than ESG's: by as much as a call has more work.
    """
    paper = esg_paper()
    longer = paper.work_s(BRANCHING) / paper.work_s(paper.applications)
    systems: Mapping[str, MakePlanner] = {
        ESG: EsgPlanner,
        IN_A_ROW: lambda assumed: EsgPlanner(assumed, EsgReading(in_a_row=True)),
        **{name: SYSTEMS[name] for name in (INFLESS, FAST, OURS)},
    }
    return {
        level.name: {
            name: simulate_esg(
                *(
                    make,
                    plan.assumed,
                    _at_intervals(level, longer),
                    plan.calls,
                    plan.seeds,
                    BRANCHING,
                )
            )
            for name, make in systems.items()
        }
        for level in paper.levels
    }


def _at_intervals(level: LoadLevel, factor: float) -> LoadLevel:
    low, high = level.interval_ms
    return replace(level, interval_ms=(factor * low, factor * high))


def _esg(plan: EsgPlan, reading: EsgReading, level: str) -> WorkflowFigures:
    def make(assumed: EsgAssumptions) -> LanePlanner:
        return EsgPlanner(assumed, reading)

    return simulate_esg(make, plan.assumed, esg_paper().level(level), plan.calls, plan.seeds)


def _cut_off(plan: EsgPlan, cut_off_ms: float) -> tuple[WorkflowFigures, WorkflowFigures]:
    """Orion with this cut-off: its search counted, and not."""

    def counted(assumed: EsgAssumptions) -> LanePlanner:
        return OrionPlanner(assumed, cut_off_ms)

    def free(assumed: EsgAssumptions) -> LanePlanner:
        return OrionPlanner(assumed, cut_off_ms, counts_search=False)

    strict = esg_paper().level(STRICT)
    one, other = (
        simulate_esg(make, plan.assumed, strict, plan.calls, plan.variant_seeds)
        for make in (counted, free)
    )
    return one, other


def _variant(plan: EsgPlan, assumed: EsgAssumptions) -> Mapping[str, BySystem]:
    return {
        level: {
            name: simulate_esg(
                SYSTEMS[name], assumed, esg_paper().level(level), plan.calls, plan.variant_seeds
            )
            for name in _VARIED
        }
        for level in (STRICT, HEAVY)
    }
