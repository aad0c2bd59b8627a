"""The order in which people are shown names."""

import re

_NUMBERS = re.compile(r"(\d+)")


def name_sort_key(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts node-9 before node-10."""
    parts = (part for part in _NUMBERS.split(name) if part)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
