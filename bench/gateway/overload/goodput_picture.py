"""Answers, refusals and waits against the offered load, as a picture; needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.gateway.overload.offered_loads import OfferedLoad

_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#999999"


def draw(systems: Mapping[str, Sequence[OfferedLoad]], path: Path) -> None:
    """Draw a column for each function: rates above, waits of the answered below."""
    figure = Figure(figsize=(4.6 * len(systems), 6.4), layout="constrained")
    panels = figure.subplots(2, len(systems), squeeze=False, sharex=True)
    for column, (name, loads) in enumerate(systems.items()):
        _draw_rates(panels[0][column], name, loads)
        _draw_waits(panels[1][column], loads)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _draw_rates(panel: Axes, name: str, loads: Sequence[OfferedLoad]) -> None:
    factors = [each.factor for each in loads]
    panel.plot(factors, [each.offered for each in loads], "--", color=_GREY, label="offered")
    panel.plot(factors, [each.answered for each in loads], "o-", color=_BLUE, label="answered")
    panel.plot(factors, [each.refused for each in loads], "s-", color=_ORANGE, label="429")
    panel.set_title(name)
    panel.set_ylabel("calls/s")
    panel.set_ylim(bottom=0)
    panel.legend()


def _draw_waits(panel: Axes, loads: Sequence[OfferedLoad]) -> None:
    factors = [each.factor for each in loads]
    panel.plot(factors, [each.p50_s for each in loads], "o-", color=_BLUE, label="p50")
    panel.plot(factors, [each.p99_s for each in loads], "o:", color=_BLUE, label="p99")
    panel.set_xlabel("offered load / capacity")
    panel.set_ylabel("seconds to an answer")
    panel.set_ylim(bottom=0)
    panel.legend()
