"""Bars, curves and trade-offs of the papers' pages; needs matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpufaas.output.bar_pictures import (
    COLOURS,
    HEIGHT_IN,
    INK,
    THESIS,
    WIDTH_IN,
    Bars,
    draw_legend,
    draw_panel,
    save,
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity along the O3 limit, ours and the thesis's."""

    unit: str
    ours: Sequence[float]
    thesis: Sequence[float]


def draw_bars(path: Path, picture: Bars) -> None:
    """One group of bars beside the other."""
    figure, axes = _figure(1, HEIGHT_IN)
    draw_panel(axes[0], picture)
    axes[0].set_xlabel(picture.across)
    draw_legend(figure, axes[0], "outside upper center")
    save(figure, path)


def draw_curves(path: Path, title: str, limits: Sequence[int], panels: Sequence[Curve]) -> None:
    """Quantities along the O3 limit, one above the other."""
    figure, axes = _figure(len(panels), 2.4 * len(panels) + 1.0)
    for panel, curve in zip(axes, panels, strict=True):
        panel.plot(limits, curve.ours, "o-", color=COLOURS[4], label="simulated")
        panel.plot(limits, curve.thesis, "s--", color=INK, markerfacecolor="white", label=THESIS)
        panel.set_ylabel(curve.unit)
        panel.set_ylim(bottom=0)
        panel.grid(visible=False, axis="x")
    axes[0].set_title(title)
    axes[0].legend()
    axes[-1].set_xlabel("O3 limit (times that a request may be passed over)")
    axes[-1].set_xticks(list(limits))
    save(figure, path)


def draw_trade_offs(
    path: Path,
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    axes_names: tuple[str, str],
) -> None:
    """Curves of points in a plane, both of whose axes are better towards zero."""
    figure, (panel,) = _figure(1, HEIGHT_IN)
    for place, (name, points) in enumerate(curves.items()):
        xs, ys = zip(*points, strict=True)
        panel.plot(xs, ys, "o-", color=COLOURS[place + 2], label=name, markersize=4)
    panel.set_title(title)
    panel.set_xlabel(axes_names[0])
    panel.set_ylabel(axes_names[1])
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.legend()
    save(figure, path)


def _figure(panels: int, height_in: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(panels, 1, squeeze=False, sharex=True)[:, 0])
