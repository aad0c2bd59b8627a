"""Cells of tables: rows in columns, and numbers with their units; pure."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, with each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def table(cells: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> str:
    """Columns with heads; `cells` gives each column's head, and its cell of a row."""
    return columns([tuple(cells), *([cell(row) for cell in cells.values()] for row in rows)])


_MINUTE_S, _HOUR_S = 60, 3600


def seconds(value: float | None) -> str:
    """A duration to three digits."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < _MINUTE_S:
        return f"{value:.3g} s"
    if value < _HOUR_S:
        return f"{value // _MINUTE_S:.0f} min {value % _MINUTE_S:.0f} s"
    return f"{value // _HOUR_S:.0f} h {value % _HOUR_S // _MINUTE_S:.0f} min"


def short_seconds(value: float) -> str:
    """A latency."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}/s"


def clock(at_s: float) -> str:
    """A moment in local time."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))
