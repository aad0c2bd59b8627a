"""Bars in one style, which it sets; needs matplotlib, so imported only by commands that draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish too.
COLOURS = ("#999999", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#CC79A7", "#D55E00", "#000000")
INK = "#333333"
THESIS = "thesis"
WIDTH_IN = 8.0
_ROOM_FOR_GROUPS = 6
HEIGHT_IN = 4.2
_DOTS_PER_INCH = 120

_Place = Literal["outside upper center", "outside lower center"]

mpl.use("agg")
mpl.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.edgecolor": INK,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 12,
        "font.size": 11,
        "grid.alpha": 0.3,
        "legend.frameon": False,
    }
)

_MOST_IN_ROW = 7  # names of a legend


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar for each policy in each group, and the thesis's figure where it gives one."""

    title: str
    unit: str
    groups: Sequence[str]
    ours: Mapping[str, Sequence[float]]
    thesis: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    logarithmic: bool = False
    whole: float | None = None
    across: str = "working set (functions)"
    lowest: float = 1.0  # of a logarithmic axis


def draw_side_by_side(path: Path, title: str, pictures: Sequence[Bars]) -> None:
    """One bar a policy, in a panel for each metric."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", fontsize=12)
    panels = figure.subplots(1, len(pictures), squeeze=False)[0]
    for panel, picture in zip(panels, pictures, strict=True):
        draw_panel(panel, picture)
        panel.set_xticks([])
    draw_legend(figure, panels[0], "outside lower center")
    save(figure, path)


def draw_panel(panel: Axes, picture: Bars) -> None:
    width = 0.84 / len(picture.ours)
    for place, (name, values) in enumerate(picture.ours.items()):
        offset = (place - (len(picture.ours) - 1) / 2) * width
        at = [group + offset for group in range(len(picture.groups))]
        colour = COLOURS[place % len(COLOURS)]
        panel.bar(at, values, width * 0.9, color=colour, label=_shown(name))
        _draw_thesis(panel, at, picture.thesis.get(name, ()))
    if any(value is not None for values in picture.thesis.values() for value in values):
        panel.scatter([], [], s=48, marker="D", facecolor="white", edgecolor=INK, label=THESIS)
    panel.set_title(picture.title)
    panel.set_ylabel(picture.unit)
    small = 8 if len(picture.groups) > _ROOM_FOR_GROUPS else None
    panel.set_xticks(range(len(picture.groups)), picture.groups, fontsize=small)
    panel.grid(visible=False, axis="x")
    if picture.logarithmic:
        panel.set_yscale("log")
        panel.set_ylim(bottom=picture.lowest)
        panel.yaxis.set_major_formatter("{x:g}")
    if picture.whole is not None:
        panel.set_ylim(0, picture.whole)


def _shown(name: str) -> str:
    """Policies have their names in small letters; systems are written as their papers do."""
    return name.upper() if name.islower() else name


def _draw_thesis(panel: Axes, at: Sequence[float], values: Sequence[float | None]) -> None:
    points = [(x, y) for x, y in zip(at, values, strict=False) if y is not None]
    if points:
        xs, ys = zip(*points, strict=True)
        panel.scatter(xs, ys, s=48, marker="D", facecolor="white", edgecolor=INK, zorder=3)


def draw_legend(figure: Figure, panel: Axes, place: _Place) -> None:
    """Name each colour once; the thesis comes last."""
    by_name = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    names = sorted(by_name, key=lambda name: name == THESIS)
    handles = [by_name[name] for name in names]
    rows = -(-len(names) // _MOST_IN_ROW)
    figure.legend(handles, names, loc=place, ncols=-(-len(names) // rows), fontsize=10)


def save(figure: Figure, path: Path) -> None:
    """Write the file; the same figures give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # No version or time in the file.
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None})
