"""The tables on exit rules: whole curves, and fixed and adaptive at equal cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from research.markdown import table
from research.sage.exit_curves import SAGE_S, ExitCurves, ExitPoint, at_equal
from research.sage.idle_walk import IdleCosts
from research.sage.sage_experiments import ExitStudy

_NONE = "–"


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
