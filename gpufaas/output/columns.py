"""Rows of text in columns."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, with each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
