"""Azure Functions traces: invocations by function and minute, read from CSV."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from common.numerals import natural
from scheduler.model.errors import BadWorkload
from scheduler.sim.workload import Pattern, Workload, apportion, spread

_NAME_COLUMNS = ("HashOwner", "HashApp", "HashFunction", "Trigger")
CARRIED = "azure"
_DIGITS = 15  # of the invocations in a minute


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a trace to replay; `without_top` leaves out its most used functions."""

    start_minute: int = 0
    minutes: int = 6
    functions: int = 35
    without_top: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Invocations in each minute, one row a function."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def minutes(self) -> int:
        return len(self.rows[0])


@cache
def read(path: str) -> Trace:
    """Read a trace file, once a process; `azure` names the one that gpufaas carries."""
    if path == CARRIED:
        carried = files("scheduler.sim").joinpath("data/azure2019_500fn_240min.csv")
        return parse(carried.read_text(encoding="utf-8"), path)
    try:
        return parse(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise BadWorkload(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadWorkload(f"{path}: not a text file in UTF-8") from error


def parse(text: str, name: str) -> Trace:
    """The trace in this CSV text."""
    try:
        return _trace(csv.reader(text.splitlines()), name)
    except csv.Error as error:  # a field longer than the module reads
        raise BadWorkload(f"{name}: {error}") from error


def _trace(lines: Iterator[list[str]], name: str) -> Trace:
    header = next(lines, [])
    minutes = len(header) - len(_NAME_COLUMNS)
    if tuple(header[: len(_NAME_COLUMNS)]) != _NAME_COLUMNS or minutes < 1:
        raise BadWorkload(
            f"{name}: row 1: expected the columns {', '.join(_NAME_COLUMNS)} and one a minute"
        )
    rows = tuple(_rows(lines, minutes, name))
    if not rows:
        raise BadWorkload(f"{name}: it has no row besides its header")
    return Trace(rows)


def workload(trace: Trace, window: Window, rate: int, pattern: Pattern, seed: int) -> Workload:
    """A window of a trace, scaled so that its busiest minute has `rate` requests."""
    end = window.start_minute + window.minutes
    if window.start_minute < 0 or window.minutes < 1 or end > trace.minutes:
        raise BadWorkload(
            f"the trace has minutes 0 to {trace.minutes - 1}, "
            f"not {window.start_minute} to {end - 1}"
        )
    if rate < 1:
        raise BadWorkload(f"rate must be at least 1, not {rate}")
    chosen = most_used(trace, window)
    by_minute = [sum(row[minute] for row in chosen) for minute in range(window.minutes)]
    busiest = max(by_minute)
    counts = [
        apportion([row[minute] for row in chosen], round(total * rate / busiest))
        for minute, total in enumerate(by_minute)
    ]
    return spread(counts, pattern, seed)


def most_used(trace: Trace, window: Window) -> list[tuple[int, ...]]:
    """The window's most used functions, the most used first."""
    end = window.start_minute + window.minutes
    rows = [row[window.start_minute : end] for row in trace.rows]
    used = sorted((row for row in rows if any(row)), key=lambda row: (-sum(row), row))
    if window.without_top < 0:
        raise BadWorkload(f"without-top must be 0 or more, not {window.without_top}")
    chosen = used[window.without_top : window.without_top + window.functions]
    if window.functions < 1 or len(chosen) < window.functions:
        raise BadWorkload(
            f"this window has {max(0, len(used) - window.without_top)} functions in use, "
            f"a working set of {window.functions} cannot be had"
        )
    return chosen


def _rows(lines: Iterator[list[str]], minutes: int, name: str) -> Iterator[tuple[int, ...]]:
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        values = line[len(_NAME_COLUMNS) :]
        if len(values) != minutes:
            raise BadWorkload(
                f"{name}: row {number}: it has {len(values)} minutes, the header {minutes}"
            )
        yield tuple(_count(value, name, number, minute) for minute, value in enumerate(values))


def _count(value: str, name: str, row: int, minute: int) -> int:
    if (count := natural(value, _DIGITS)) is not None:
        return count
    raise BadWorkload(
        f"{name}: row {row}, minute column {minute + 1}: "
        f"{value!r} is not a number of invocations (a whole number, 0 or more)"
    )
