"""What each part held over a soak, as a picture; needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hunt.soak.soak_growth import SeriesPoint
from hunt.soak.soak_sampler import Series, SeriesName

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#000000")
_MIB, _MINUTE_S, _MOST_POINTS = 1 << 20, 60.0, 180
_OF_PARTS = ("private bytes", "descriptors", "threads", "processes")
_TABLES = (
    SeriesName("scheduler", "known models"),
    SeriesName("scheduler", "resident models"),
    SeriesName("scheduler", "leases"),
    SeriesName("gateway", "functions"),
    SeriesName("gpu-manager", "sessions"),
    SeriesName("etcd", "keys"),
    SeriesName("all", "files in memory"),
)
_SHOWN_METRICS = "metrics shown"


def draw(series: Series, path: str) -> None:
    """A panel for memory, descriptors, threads and processes of all parts, and two for tables."""
    figure = Figure(figsize=(13.0, 6.8), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True).flat
    for panel, what in zip(panels, _OF_PARTS, strict=False):
        _draw(
            panel, what, {name.part: series[name] for name in sorted(series) if name.what == what}
        )
        if "bytes" in what:
            panel.set_ylabel("MiB")
    tables, metrics = figure.axes[len(_OF_PARTS) :]
    _draw(tables, "tables", {f"{n.part}: {n.what}": series[n] for n in _TABLES if n in series})
    shown = {name.part: series[name] for name in sorted(series) if name.what == _SHOWN_METRICS}
    _draw(metrics, "lines of metrics", shown)
    for panel in figure.axes[3:]:
        panel.set_xlabel("minutes")
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(where, metadata={"Date": None})


def _draw(panel: Axes, title: str, lines: Mapping[str, Sequence[SeriesPoint]]) -> None:
    scale = _MIB if "bytes" in title else 1
    for (label, points), colour in zip(lines.items(), _COLOURS, strict=False):
        few = thinned(points)
        panel.plot(
            [each.at_s / _MINUTE_S for each in few],
            [each.value / scale for each in few],
            color=colour,
            linewidth=1,
            label=label,
        )
    panel.set_title(title)
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="x-small")


def thinned(points: Sequence[SeriesPoint]) -> list[SeriesPoint]:
    """At most so many points as a picture can show: medians of those beside each other."""
    together = -(-len(points) // _MOST_POINTS) or 1
    groups = [points[at : at + together] for at in range(0, len(points), together)]
    return [
        SeriesPoint(median(p.at_s for p in group), median(p.value for p in group))
        for group in groups
    ]
