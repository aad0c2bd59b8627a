"""The tables on SAGE's systems: ours beside print, function by function, and by assumption."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from research.markdown import table
from research.sage.gpu_functions import ten_functions
from research.sage.gpu_systems import DGSF, FIXED_GSL, FIXED_GSL_F, SAGE
from research.sage.node_figures import RatiosToSage, SystemFigures
from research.sage.printed_numbers import sage_paper
from research.sage.sage_experiments import GridPoint, SageEvaluation, over_sage
from research.sage.sage_headlines import JudgedHeadline
from research.sage.shared_engines import setup_s
from research.sage.system_study import STATES

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
