"""Markdown tables."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first columns are text, to the left, and the others figures, to the right."""
    rule = ["---" if place < text_columns else "---:" for place in range(len(head))]
    return "\n".join(_line(cells) for cells in (head, rule, *rows))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
