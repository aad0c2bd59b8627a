"""The generated parts of docs/evaluation/sage.md, by name: tables on systems and on exit rules."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from research.markdown import table
from research.sage.exit_curves import SAGE_S, ExitCurves, ExitPoint, at_equal
from research.sage.experiments import ExitStudy, GridPoint, SageEvaluation, over_sage
from research.sage.gpu_functions import ten_functions
from research.sage.gpu_systems import DGSF, FIXED_GSL, FIXED_GSL_F, SAGE
from research.sage.headlines import JudgedHeadline, judged_headlines
from research.sage.idle_walk import IdleCosts
from research.sage.node_figures import RatiosToSage, SystemFigures
from research.sage.printed_numbers import sage_paper
from research.sage.shared_engines import setup_s
from research.sage.system_study import STATES, SageSetting
from research.thesis.claims import Verdict

_MS = 1e3
_NONE = "–"


def table4(evaluation: SageEvaluation) -> str:
    """resnet50's end-to-end times in each state."""
    columns = sage_paper().table4
    ours = [evaluation.table4_s[column.state] * _MS for column in columns]
    rows = [
        ["SAGE, ms", *(f"{column.end_to_end_ms:.1f}" for column in columns)],
        ["simulated, ms", *(f"{value:.1f}" for value in ours)],
        [
            "difference, ms",
            *(
                f"{value - column.end_to_end_ms:+.1f}"
                for value, column in zip(ours, columns, strict=True)
            ),
        ],
    ]
    return table(["", *(column.state for column in columns)], rows)


def headlines(judged: Sequence[JudgedHeadline]) -> str:
    """Every printed number with ours."""
    rows = [
        [
            each.printed.text,
            f"{each.printed.value:g} {_unit(each)}",
            f"{each.ours:.3g} {_unit(each)}",
            f"× {each.factor:.2f}",
            str(each.verdict),
        ]
        for each in judged
    ]
    return table(["headline", "SAGE", "simulated", "distance", "verdict"], rows)


def functions(evaluation: SageEvaluation) -> str:
    """Table 2 with the times that follow from the assumptions, in milliseconds."""
    rows = []
    for each in ten_functions(evaluation.plan.setting.assumed):
        stages = [setup_s(each, stage) for stage in STATES.values()]
        rows.append(
            [
                each.name,
                f"{each.read_only_mb:g}",
                f"{each.writable_mb:g}",
                *(
                    f"{seconds * _MS:.1f}"
                    for seconds in (each.database_s, each.pcie_s, each.compute_s, *stages)
                ),
                f"{100 * (1 - each.parallel_setup_s / each.serial_setup_s):.1f} %",
            ]
        )
    head = ["function", "read-only MB", "writable MB", "database", "PCIe", "compute"]
    return table([*head, *(f"set-up, {state}" for state in STATES), "parallel saves"], rows)


def latencies(found: Mapping[str, SystemFigures]) -> str:
    """Mean latencies by function and system, in seconds, of the calls that ended in time."""
    names = list(found[SAGE.name].latencies)
    rows = [[name, *(_mean_latency(each, name) for each in found.values())] for name in names]
    return table(["function, mean latency in s", *found], rows)


def systems(found: Mapping[str, SystemFigures]) -> str:
    """Throughput, memory and latency of each system."""
    rows = [
        [
            name,
            f"{each.throughput:.2f}",
            f"{100 * each.throughput / each.arrived:.1f} %",
            f"{each.memory_mb / 1024:.1f}",
            f"{each.mean_s:.2f}",
            f"{fmean(latency.p99_s for latency in each.latencies.values()):.2f}",
        ]
        for name, each in found.items()
    ]
    head = ["system", "calls ended a second", "of those that came", "memory in use, GiB"]
    return table([*head, "mean latency, s", "99th percentile, s"], rows)


def at_peak(evaluation: SageEvaluation) -> str:
    """Each function alone at peak, under FixedGSL and SAGE."""
    fixed, sage = evaluation.peaks[FIXED_GSL.name], evaluation.peaks[SAGE.name]
    rows = [
        [
            one.name,
            f"{100 * one.of_theory:.0f} %",
            f"{100 * other.of_theory:.0f} %",
            f"{one.loading:.1f}",
            f"{other.loading:.1f}",
            f"{100 * (other.setup - 1):+.1f} %",
        ]
        for one, other in zip(fixed, sage, strict=True)
    ]
    head = ["function", "FixedGSL, of theory", "SAGE, of theory"]
    more = ["FixedGSL, loading slower ×", "SAGE, loading slower ×", "SAGE, set-up"]
    return table([*head, *more], rows)


def peak_along_contention(evaluation: SageEvaluation) -> str:
    """FixedGSL's averages at peak under each contention."""
    rows = [
        [f"{contention:g}", f"{found['theory FixedGSL']:.1f} %", f"{found['loading']:.1f}"]
        for contention, found in evaluation.peaks_by_contention.items()
    ]
    return table(["contention", "FixedGSL, of theory", "FixedGSL, loading slower ×"], rows)


def grid(points: Sequence[GridPoint]) -> str:
    """The distance from SAGE's fifteen ratios by load and contention."""
    contentions = list(dict.fromkeys(point.contention for point in points))
    lowest = min(point.distance for point in points)
    rows = [
        [
            f"{load:g}",
            *(
                f"**{point.distance:.2f}**" if point.distance == lowest else f"{point.distance:.2f}"
                for point in points
                if point.load == load
            ),
        ]
        for load in dict.fromkeys(point.load for point in points)
    ]
    return table(["load \\ contention", *(f"{each:g}" for each in contentions)], rows)


def along_contention(evaluation: SageEvaluation) -> str:
    """What the chosen load gives under each contention."""
    rows = [
        [f"{point.contention:g}", *_ratio_cells(point.ratios)]
        for point in evaluation.grid
        if point.load == evaluation.plan.setting.load
    ]
    return table(["contention", *_RATIO_HEAD], rows)


def along_load(evaluation: SageEvaluation) -> str:
    """What the chosen contention gives under each load."""
    rows = [
        [f"{point.load:g}", *_ratio_cells(point.ratios)]
        for point in evaluation.grid
        if point.contention == evaluation.plan.setting.assumed.contention
    ]
    return table(["load", *_RATIO_HEAD], rows)


def assumptions(evaluation: SageEvaluation) -> str:
    """What the headlines become under other assumptions."""
    rows = []
    for label, (found, peak) in evaluation.variants.items():
        saved = [peak["theory FixedGSL"], peak["theory SAGE"], peak["setup at peak"]]
        cells = [*(f"{value:.1f}" for value in saved), f"{peak['loading']:.1f}"]
        rows.append([label, *_ratio_cells(over_sage(found)), *cells])
    more = ["FixedGSL of theory, %", "SAGE of theory, %", "set-up saved, %", "loading ×"]
    return table(["assumption", *_RATIO_HEAD, *more], rows)


_RATIO_HEAD = (
    "mean: GSL", "GSL-F", "DGSF", "throughput: GSL", "GSL-F", "DGSF", "memory %: GSL", "DGSF",
)  # fmt: skip


def _ratio_cells(found: Mapping[str, RatiosToSage]) -> list[str]:
    three = [found[system.name] for system in (FIXED_GSL, FIXED_GSL_F, DGSF)]
    means = [f"{each.mean:.3g}" for each in three]
    throughputs = [f"{each.throughput:.2f}" for each in three]
    memory = [f"{found[system.name].memory_percent:.1f}" for system in (FIXED_GSL, DGSF)]
    return [*means, *throughputs, *memory]


def _mean_latency(found: SystemFigures, name: str) -> str:
    return f"{found.latencies[name].mean_s:.3f}" if name in found.latencies else _NONE


def _unit(judged: JudgedHeadline) -> str:
    return "×" if judged.printed.unit == "x" else "%"


@dataclass(frozen=True, slots=True)
class EqualPoints:
    """Changes in percent against SAGE's 30 s a stage; None where a curve does not reach it."""

    cold_at_memory: float | None
    memory_at_cold: float | None
    waits_at_memory: float | None
    bound_cold: float | None
    bound_memory: float | None


def equal_points(curves: ExitCurves) -> EqualPoints:
    """Adaptive, and hindsight, where they cost as much as SAGE's own setting in one respect."""
    sage = curves.sage

    def change(points: Sequence[ExitPoint], equal: str, wanted: str) -> float | None:
        found = at_equal(points, equal, getattr(sage, equal), wanted)
        return None if found is None else 100.0 * (found / getattr(sage, wanted) - 1.0)

    return EqualPoints(
        cold_at_memory=change(curves.adaptive, "gpu_gib_s", "cold"),
        memory_at_cold=change(curves.adaptive, "cold", "gpu_gib_s"),
        waits_at_memory=change(curves.adaptive, "gpu_gib_s", "waited_s"),
        bound_cold=change(curves.hindsight, "gpu_gib_s", "cold"),
        bound_memory=change(curves.hindsight, "cold", "gpu_gib_s"),
    )


def equal_table(study: ExitStudy) -> str:
    """One line a window, then all together, the worst, and calls at even distances."""
    each = [equal_points(window) for window in study.windows]
    rows = [
        [f"{number}", f"{window.sage.calls}", *_equal_cells(points)]
        for number, (window, points) in enumerate(zip(study.windows, each, strict=True), start=1)
    ]
    rows.append(["all", f"{study.all.sage.calls}", *_equal_cells(equal_points(study.all))])
    rows.append(["the worst", "", *_worst_cells(each)])
    if study.regular:
        together, regular = study.regular_all, [equal_points(one) for one in study.regular]
        rows.append(
            ["all, even distances", f"{together.sage.calls}", *_equal_cells(equal_points(together))]
        )
        rows.append(["the worst, even distances", "", *_worst_cells(regular)])
    head = ["window", "calls", "cold loads at equal GPU memory", "GPU memory at equal cold loads"]
    more = ["waiting at equal GPU memory", "hindsight: cold loads", "hindsight: GPU memory"]
    return table([*head, *more], rows)


def defaults_table(study: ExitStudy) -> str:
    """SAGE's setting, adaptive's own, and a fixed rule that keeps no weights on the GPU."""
    sage = study.all.sage
    rows = [
        ["`fixed`: 30 s a stage", *_cost_cells(sage), ""],
        [f"`fixed:0,{2 * SAGE_S:g},{SAGE_S:g},{SAGE_S:g}`: contexts alone on the GPU",
         *_cost_cells(study.context_only), _change_cells(study.context_only, sage)],
        ["`adaptive`", *_cost_cells(study.default), _change_cells(study.default, sage)],
    ]  # fmt: skip
    return table(["rule", *_COSTS, "GPU memory, host memory, cold, waiting"], rows)


def machine_table(study: ExitStudy) -> str:
    """SAGE with each rule in the whole simulator."""
    rows = [
        [
            f"`{rule}`",
            f"{found.memory_mb / 1024:.1f}",
            f"{100 * found.cold_share:.1f} %",
            f"{1e3 * found.of_calls.mean_s:.1f}",
            f"{1e3 * found.of_calls.p99_s:.0f}",
        ]
        for rule, found in study.on_machine.items()
    ]
    head = ["rule", "GPU memory in use, GiB", "cold loads, of calls", "mean latency, ms"]
    return table([*head, "99th percentile, ms"], rows)


def curve_table(study: ExitStudy) -> str:
    """Every setting of every rule, over all windows together."""
    found = study.all
    rows = [
        [name, f"{point.parameter:g}", *_cost_cells(point.costs)]
        for name, points in (
            ("`fixed`, s a stage", found.fixed),
            ("`adaptive`, worth", found.adaptive),
            ("hindsight, worth", found.hindsight),
        )
        for point in points
    ]
    return table(["rule", "parameter", *_COSTS], rows)


_COSTS = ("GPU GiB·h", "host GiB·h", "cold loads", "calls that find nothing", "waiting, s")


def _cost_cells(costs: IdleCosts) -> list[str]:
    return [
        f"{costs.gpu_gib_s / 3600:.1f}",
        f"{costs.host_gib_s / 3600:.1f}",
        f"{costs.cold}",
        f"{costs.gone}",
        f"{costs.waited_s:.0f}",
    ]


def _change_cells(costs: IdleCosts, sage: IdleCosts) -> str:
    pairs = (
        (costs.gpu_gib_s, sage.gpu_gib_s),
        (costs.host_gib_s, sage.host_gib_s),
        (costs.cold, sage.cold),
        (costs.waited_s, sage.waited_s),
    )
    return ", ".join(f"{100 * (ours / theirs - 1):+.0f} %" for ours, theirs in pairs)


def _equal_cells(points: EqualPoints) -> list[str]:
    return [_percent(value) for value in _values(points)]


def _worst_cells(each: Sequence[EqualPoints]) -> list[str]:
    by_column = zip(*(_values(points) for points in each), strict=True)
    return [_percent(_highest(column)) for column in by_column]


def _highest(column: Sequence[float | None]) -> float | None:
    """The least gain; None where one of them is unknown."""
    known = [value for value in column if value is not None]
    return max(known) if len(known) == len(column) else None


def _values(points: EqualPoints) -> Iterator[float | None]:
    yield points.cold_at_memory
    yield points.memory_at_cold
    yield points.waits_at_memory
    yield points.bound_cold
    yield points.bound_memory


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:+.0f} %"


# Table 4 is printed to a tenth of a millisecond.
_PRINTED_TO_MS = 0.05
PICTURES = {
    "sage-latency": "Mean latency by function and system",
    "sage-memory": "GPU memory in use, throughput",
    "sage-exits": "GPU memory against cold loads, under three exit rules",
}


def sage_blocks(evaluation: SageEvaluation) -> Mapping[str, str]:
    """Each part in Markdown, in the order of the page."""
    return {
        "summary": _summary(evaluation),
        "table 4": table4(evaluation),
        "headlines": headlines(judged_headlines(evaluation)),
        "functions": functions(evaluation),
        "latency": _picture("sage-latency") + latencies(evaluation.main),
        "systems": _picture("sage-memory") + systems(evaluation.main),
        "peak": at_peak(evaluation),
        "peak by contention": peak_along_contention(evaluation),
        "thirty": systems(evaluation.thirty),
        "four": systems(evaluation.four),
        "setting": _grid(evaluation),
        "sensitivity": assumptions(evaluation),
        "exits": _exits(evaluation),
        "exits on the machine": machine_table(evaluation.exits),
        "exit curves": curve_table(evaluation.exits),
    }


def _picture(name: str) -> str:
    return f"![{PICTURES[name]}](../pictures/{name}.png)\n\n"


def _summary(evaluation: SageEvaluation) -> str:
    judged = judged_headlines(evaluation)
    count = Counter(each.verdict for each in judged)
    verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict)
    exact = all(
        abs(evaluation.table4_s[column.state] * 1e3 - column.end_to_end_ms) < _PRINTED_TO_MS
        for column in sage_paper().table4
    )
    equal = equal_points(evaluation.exits.all)
    return (
        f"The setting: {_in_words(evaluation.plan.setting)}.\n"
        f"Headlines: {len(judged)}, of which {verdicts}. "
        f"Table 4: {'exact in all six columns' if exact else 'not exact'}.\n"
        f"`adaptive` against 30 s a stage, all windows: {_change(equal.cold_at_memory)} cold loads "
        f"at equal GPU memory, {_change(equal.memory_at_cold)} GPU memory at equal cold loads."
    )


def _in_words(setting: SageSetting) -> str:
    assumed = setting.assumed
    return (
        f"load {setting.load:g} of what the GPU's cores can compute, contention "
        f"{assumed.contention:g} a further transfer, {assumed.request_ms:g} ms for each request to "
        f"the database, {setting.minutes} minutes of the trace"
    )


def _grid(evaluation: SageEvaluation) -> str:
    return "\n\n".join(
        (
            grid(evaluation.grid),
            "Along contention, at the chosen load:",
            along_contention(evaluation),
            "Along load, at the chosen contention:",
            along_load(evaluation),
        )
    )


def _exits(evaluation: SageEvaluation) -> str:
    return "\n\n".join(
        (
            _picture("sage-exits").rstrip(),
            equal_table(evaluation.exits),
            defaults_table(evaluation.exits),
        )
    )


def _change(percent: float | None) -> str:
    return "an unknown change of" if percent is None else f"{percent:+.0f} %"
