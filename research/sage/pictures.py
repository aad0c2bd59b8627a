"""The pictures of the page on SAGE; needs matplotlib, so imported only by commands that draw."""

from pathlib import Path

from gpufaas.output.bar_pictures import Bars, draw_side_by_side
from research.pictures import draw_bars, draw_trade_offs
from research.sage.exit_curves import ExitPoint
from research.sage.experiments import SageEvaluation
from research.sage.gpu_systems import DGSF, FIXED_GSL, FIXED_GSL_F, SAGE, SAGE_NR

_SYSTEMS = (FIXED_GSL, FIXED_GSL_F, DGSF, SAGE_NR, SAGE)
_HOUR_S = 3600.0


def draw_sage(folder: Path, evaluation: SageEvaluation) -> None:
    """Draw all three pictures into the folder."""
    _draw_latency(folder / "sage-latency.png", evaluation)
    _draw_memory(folder / "sage-memory.png", evaluation)
    _draw_exits(folder / "sage-exits.png", evaluation)


def _draw_latency(path: Path, evaluation: SageEvaluation) -> None:
    found = {system.name: evaluation.main[system.name] for system in _SYSTEMS}
    names = list(found[SAGE.name].latencies)
    ours = {
        system: [each.latencies[name].mean_s if name in each.latencies else 0.0 for name in names]
        for system, each in found.items()
    }
    title = "Mean latency of the calls that ended within the period"
    bars = Bars(
        title, "seconds (logarithmic)", names, ours, logarithmic=True, across="", lowest=0.01
    )
    draw_bars(path, bars)


def _draw_memory(path: Path, evaluation: SageEvaluation) -> None:
    found = {system.name: evaluation.main[system.name] for system in _SYSTEMS}
    memory = {name: [each.memory_mb / 1024] for name, each in found.items()}
    throughput = {name: [each.throughput] for name, each in found.items()}
    draw_side_by_side(
        path,
        "SAGE's systems under one load",
        [
            Bars("GPU memory in use", "GiB", [""], memory),
            Bars("Throughput", "calls a second", [""], throughput),
        ],
    )


def _draw_exits(path: Path, evaluation: SageEvaluation) -> None:
    found = evaluation.exits.all
    draw_trade_offs(
        path,
        "Idle functions: GPU memory against cold loads, ten windows of the trace",
        {
            "fixed": _points(found.fixed),
            "adaptive": _points(found.adaptive),
            "hindsight": _points(found.hindsight),
        },
        ("GPU memory of idle functions (GiB·h)", "cold loads"),
    )


def _points(points: tuple[ExitPoint, ...]) -> list[tuple[float, float]]:
    return [(point.costs.gpu_gib_s / _HOUR_S, float(point.costs.cold)) for point in points]
