"""Numbers in texts that others send: ASCII digits; no blanks, underscores, signs but `-`, nan, inf.

Python's own `int` and `float` take all of these, and the digits of every script.
"""

import math
import re

_DIGITS = re.compile(r"[0-9]+")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?(?:[0-9]{1,64}(?:\.[0-9]{0,64})?|\.[0-9]{1,64})(?:[eE][-+]?[0-9]{1,3})?")
_SHOWN = 80


def whole(text: str) -> int:
    """The whole number, of 18 digits at most; ValueError if the text is none."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:_SHOWN]!r} is no whole number")
    return int(text)


def natural(text: str, most_digits: int = 18) -> int | None:
    """The whole number from 0, of so many digits at most; None if the text is none."""
    return int(text) if len(text) <= most_digits and _DIGITS.fullmatch(text) else None


def number(text: str) -> float:
    """The number; ValueError if the text is none, or if it is too large."""
    found = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(found):
        raise ValueError(f"{text[:_SHOWN]!r} is no number")
    return found


def name_sort_key(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts node-9 before node-10."""
    parts = filter(None, re.split(r"([0-9]+)", name))
    return [(0, int(part), "") if _DIGITS.fullmatch(part) else (1, 0, part) for part in parts]
