"""A picture of a load: latency over time, and the distribution of latencies."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.load.load_run import LoadOutcome
from scheduler.sim.simulation_tally import percentile

_BLUE, _ORANGE, _RED = "#0072B2", "#E69F00", "#D55E00"
_SLICES = 100
_BINS_A_DECADE = 20
_MOST_POINTS = 20_000


def draw(outcome: LoadOutcome, path: Path) -> None:
    """Draw the picture with the style of the evaluation's pictures."""
    figure = Figure(figsize=(8.0, 6.4), layout="constrained")
    over_time, often = figure.subplots(2, 1)
    _draw_over_time(over_time, outcome)
    _draw_histogram(often, outcome)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw_over_time(panel: Axes, outcome: LoadOutcome) -> None:
    tally = outcome.tally
    places = range(len(tally))
    good = [place for place in places if tally.succeeded(place)]
    failed = [place for place in places if not tally.succeeded(place)]
    for own, colour, label in ((good, _BLUE, "answered"), (failed, _RED, "failed")):
        shown = own[:: 1 + len(own) // _MOST_POINTS]
        if shown:
            panel.scatter(
                [tally.due_s[place] for place in shown],
                [1000 * tally.latency_s[place] for place in shown],
                s=3,
                color=colour,
                alpha=0.4,
                linewidths=0,
                label=label,
                rasterized=True,
            )
    _draw_percentiles(panel, [(tally.due_s[one], 1000 * tally.latency_s[one]) for one in good])
    panel.set_title("Latency over time")
    panel.set_xlabel("s")
    panel.set_ylabel("ms")
    panel.set_yscale("log")
    if good or failed:
        panel.legend(loc="upper right", fontsize=9)


def _draw_percentiles(panel: Axes, points: list[tuple[float, float]]) -> None:
    if not points:
        return
    width_s = max(at_s for at_s, _ in points) / _SLICES or 1.0
    slices: dict[int, list[float]] = {}
    for at_s, latency_ms in points:
        slices.setdefault(int(at_s / width_s), []).append(latency_ms)
    at = [(number + 0.5) * width_s for number in sorted(slices)]
    for share, colour, style in ((0.5, _ORANGE, "-"), (0.99, _ORANGE, ":")):
        values = [percentile(sorted(slices[number]), share) for number in sorted(slices)]
        panel.plot(at, values, style, color=colour, label=f"p{100 * share:g}")


def _draw_histogram(panel: Axes, outcome: LoadOutcome) -> None:
    tally = outcome.tally
    good = [1000 * tally.latency_s[one] for one in range(len(tally)) if tally.succeeded(one)]
    panel.set_title("Distribution")
    panel.set_xlabel("ms")
    panel.set_ylabel("calls")
    if not good:
        return
    lowest = math.floor(_BINS_A_DECADE * math.log10(max(min(good), 1e-3)))
    highest = math.ceil(_BINS_A_DECADE * math.log10(max(*good, 1e-3))) + 1
    edges = [10 ** (number / _BINS_A_DECADE) for number in range(lowest, highest + 1)]
    panel.hist(good, edges, color=_BLUE)
    panel.set_xscale("log")
    for share in (0.5, 0.99):
        at_ms = percentile(sorted(good), share)
        panel.axvline(at_ms, color=_ORANGE, linewidth=1)
        panel.annotate(
            f"p{100 * share:g}: {at_ms:.2f} ms",
            (at_ms, 0.95),
            xycoords=("data", "axes fraction"),
            fontsize=9,
        )
