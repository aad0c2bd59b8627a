"""The pictures of Figures 5 to 10: our figures with the thesis's; needs matplotlib."""

from pathlib import Path

from gpufaas.output.bar_pictures import Bars
from research.pictures import Curve, draw_bars, draw_curves
from research.thesis.experiments import Measured
from research.thesis.printed_figures import SWEEP_WORKING_SET, Paper

# File, title, unit and metric of the pictures with a bar for each policy.
_BARS = (
    ("figure05-average-latency", "5: average latency", "seconds (logarithmic)", "avg_latency_s"),
    ("figure06-miss-ratio", "6: miss ratio", "share of placements", "miss_ratio"),
    ("figure07-busy-ratio", "7: GPU busy ratio over that of RR", "ratio to RR", "gpu_busy_ratio"),
    ("figure08-false-miss-ratio", "8: false-miss ratio", "share of misses", "false_miss_ratio"),
    ("figure09-duplicates", "9: GPUs that hold vgg19", "GPUs of 12", "top_copies"),
)


def draw_chapter(folder: Path, measured: Measured, paper: Paper) -> None:
    """Draw all six pictures into the folder."""
    for name, title, unit, metric in _BARS:
        bars = Bars(
            f"Figure {title}",
            unit,
            [str(size) for size in paper.working_sets],
            _ours(measured, paper, metric),
            _theirs(paper, metric),
            logarithmic=metric == "avg_latency_s",
            whole=1.0 if metric in {"miss_ratio", "false_miss_ratio"} else None,
        )
        draw_bars(folder / f"{name}.png", bars)
    _draw_sweep(folder / "figure10-o3-limit.png", measured, paper)


def _draw_sweep(path: Path, measured: Measured, paper: Paper) -> None:
    limits = [row.o3_limit for row in paper.table3]
    ours = [measured.sweep[limit] for limit in limits]
    latency = Curve(
        "average latency (s)",
        [figures.avg_latency_s for figures in ours],
        [row.avg_latency_s for row in paper.table3],
    )
    misses = Curve(
        "miss ratio",
        [figures.miss_ratio for figures in ours],
        [row.miss_ratio for row in paper.table3],
    )
    title = "Figure 10: LALBO3 along its O3 limit, working set 35"
    draw_curves(path, title, limits, [latency, misses])


def _ours(measured: Measured, paper: Paper, metric: str) -> dict[str, list[float]]:
    reference = paper.policies[0]
    return {
        policy: [
            measured.ratio(policy, reference, metric, size)
            if metric == "gpu_busy_ratio"
            else measured.figures[policy, size].metric(metric)
            for size in paper.working_sets
        ]
        for policy in paper.policies
    }


def _theirs(paper: Paper, metric: str) -> dict[str, list[float | None]]:
    sizes, known = paper.working_sets, paper.policies
    if metric == "top_copies":
        return {policy: [paper.copies(policy, size)[0] for size in sizes] for policy in known}
    if metric == "gpu_busy_ratio":
        return {
            policy: [paper.utilisation_ratio(policy)] * len(sizes)
            for policy in paper.sm_utilisation
        }
    implied = paper.implied(metric)
    return {
        policy: [implied.get(policy) if size == SWEEP_WORKING_SET else None for size in sizes]
        for policy in known
    }
