"""Markdown tables and paragraphs."""

from collections.abc import Sequence
from textwrap import fill

_WIDTH = 100


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first columns are text, to the left, and the others figures, to the right."""
    rule = ["---" if place < text_columns else "---:" for place in range(len(head))]
    return "\n".join(_line(cells) for cells in (head, rule, *rows))


def paragraph(text: str) -> str:
    """Text with its lines broken anew, so that figures put into it do not make them ragged."""
    return fill(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
