"""Owners with their terms and what they use, as a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.numerals import format_size
from gpufaas.output.columns import columns

_HEAD = (
    "OWNER",
    "SET BY",
    "WEIGHT",
    "PRIORITY",
    "GPU TIME",
    "GPU MEMORY",
    "LEASES",
    "WAITING",
    "HELD BACK",
    "REFUSED",
)


def quota_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line an owner, each use beside its limit: `3 of 4`."""
    return columns([_HEAD, *map(_line, rows)])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    terms, use = row["terms"], row["use"]
    return (
        row["owner"],
        row["set_by"] or "-",
        f"{terms['weight']:g}",
        str(terms["priority"]),
        _gpu_time(terms, use),
        _of(use["resident_bytes"], terms["resident_bytes"], format_size),
        _of(use["leases"], terms["leases"], str),
        _of(use["waiting"], terms["waiting"], str),
        str(use["held_back"]),
        str(sum(use["refused"].values())),
    )


def _gpu_time(terms: Mapping[str, Any], use: Mapping[str, Any]) -> str:
    """Seconds in the window, which is named where it limits something."""
    used = _of(use["gpu_s"], terms["gpu_s"], _seconds)
    return used if terms["gpu_s"] is None else f"{used} in {terms['window_s']:g} s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


def _of(used: Any, limit: Any, text: Callable[[Any], str]) -> str:
    return text(used) if limit is None else f"{text(used)} of {text(limit)}"
