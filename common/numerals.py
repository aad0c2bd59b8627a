"""Numbers and sizes that others write: ASCII digits; no blanks, underscores, signs but `-`, nan.

Python's own `int` and `float` take all of these, and the digits of every script.
"""

import math
import re

from common.errors import BadSize

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
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]!r} is no number")
    return value


def name_sort_key(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts node-9 before node-10."""
    parts = filter(None, re.split(r"([0-9]+)", name))
    return [(0, int(part), "") if _DIGITS.fullmatch(part) else (1, 0, part) for part in parts]


_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)(b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST_BYTES = 1 << 62  # of any memory or disk
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_size(text: str) -> int:
    """The bytes that a text names: `g` and `GiB` are 1024 to the third, `GB` is 1000."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadSize(text)
    number, prefix, binary, byte = match.groups()
    if binary and not (prefix and byte):
        raise BadSize(text)
    base = 1000 if prefix and byte and not binary else 1024
    size = float(number) * base ** _POWERS[prefix.lower()]
    if not 1 <= size <= _MOST_BYTES:
        raise BadSize(text)
    return int(size)


def format_size(size_bytes: int) -> str:
    """A size for people, to three digits: 97.8 MiB."""
    size = float(size_bytes)
    for unit in _UNITS[:-1]:
        if abs(size) < 1024:  # noqa: PLR2004 (the factor between two units)
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} {_UNITS[-1]}"
