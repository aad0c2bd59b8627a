"""Sizes as people write them: 512MiB, 8GiB, 2g, 1.5GB."""

import re

from common.errors import BadSize

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
