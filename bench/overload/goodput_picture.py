"""Answers, refusals and waits against the offered load, as a picture; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.overload.offered_loads import OfferedLoad

_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#999999"
_LINES = ("o-", "s--", "^-.", "v:")


def draw(columns: Sequence[tuple[str, Sequence[OfferedLoad], float]], path: str) -> None:
    """Draw a column for each case: rates above, waits of the answered below, with their bound."""
    figure = Figure(figsize=(2.7 * len(columns) + 0.8, 5.4), layout="constrained")
    panels = figure.subplots(2, len(columns), squeeze=False, sharex=True)
    for number, (name, loads, bound_s) in enumerate(columns):
        _draw_rates(panels[0][number], name, loads)
        _draw_waits(panels[1][number], loads, bound_s)
    panels[0][0].set_ylabel("calls/s")
    panels[0][0].legend()
    panels[1][0].set_ylabel("seconds to an answer")
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(where, metadata={"Date": None})


def _draw_rates(panel: Axes, name: str, loads: Sequence[OfferedLoad]) -> None:
    factors = [each.factor for each in loads]
    panel.plot(factors, [each.offered for each in loads], "--", color=_GREY, label="offered")
    panel.plot(factors, [each.answered for each in loads], "o-", color=_BLUE, label="answered")
    panel.plot(factors, [each.refused for each in loads], "s-", color=_ORANGE, label="refused")
    panel.set_title(name)
    panel.set_ylim(bottom=0)


def _draw_waits(panel: Axes, loads: Sequence[OfferedLoad], bound_s: float) -> None:
    """The median and the 99th percentile of each kind of calls."""
    factors = [each.factor for each in loads]
    panel.axhline(bound_s, color=_GREY, linewidth=1, label="bound")
    for number, line in zip(range(len(loads[0].kinds)), _LINES, strict=False):
        kinds = [each.kinds[number] for each in loads]
        label = f"{kinds[0].name} " if len(loads[0].kinds) > 1 else ""
        panel.plot(factors, [each.p99_s for each in kinds], line, color=_BLUE, label=f"{label}p99")
        panel.plot(
            factors, [each.p50_s for each in kinds], line, color=_ORANGE, label=f"{label}p50"
        )
    panel.set_xlabel("offered load / capacity")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
