"""Requests over virtual time: the thesis's workload and the real Azure trace."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random

from cache_manager.model.ids import ModelId
from common.numerals import natural
from scheduler.model.errors import BadWorkload
from scheduler.sim.model_catalogue import SimModel, working_set

MINUTE_S = 60.0

# Thesis, section 5.4: the five most used models make this share of all requests, in percent.
MOST_USED_SHARES = (13.0, 11.0, 9.0, 4.0, 3.0)
# Section 5.1: the fifteen most used make 56 %. Ranks 6 and beyond follow the power law through
# rank 5 that gives the fifteen exactly that share.
TAIL_EXPONENT = 0.9510


class Arrivals(StrEnum):
    """How the requests of a minute are spread over it; the thesis does not say."""

    UNIFORM = "uniform"
    POISSON = "poisson"
    BUNCHED = "bunched"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Arrivals within a minute; bunched ones come in its first `bunch_s` seconds."""

    arrivals: Arrivals = Arrivals.UNIFORM
    bunch_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.bunch_s <= MINUTE_S:
            raise BadWorkload(f"bunch-s must be from 0 to 60 seconds, not {self.bunch_s:g}")

    def times(self, minute: int, number: int, random: Random) -> list[float]:
        """When the requests of one minute arrive, in order."""
        start_s = minute * MINUTE_S
        if self.arrivals is Arrivals.POISSON:
            # A Poisson process whose number of arrivals in this minute is given.
            return sorted(start_s + MINUTE_S * random.random() for _ in range(number))
        width_s = MINUTE_S if self.arrivals is Arrivals.UNIFORM else self.bunch_s
        return [start_s + width_s * place / number for place in range(number)]


@dataclass(frozen=True, slots=True)
class Workload:
    """Models, and which of them is requested at which second."""

    models: tuple[SimModel, ...]
    arrivals: tuple[tuple[float, ModelId], ...]

    @property
    def arriving_s(self) -> float:
        """When the last minute in which requests arrive ends."""
        return MINUTE_S * (self.arrivals[-1][0] // MINUTE_S + 1.0) if self.arrivals else 0.0


def popularity(size: int) -> list[float]:
    """Shares of the functions of a working set, from the most to the least used; they sum to 1."""
    if size < 1:
        raise BadWorkload(f"a working set must have at least 1 function, not {size}")
    last = len(MOST_USED_SHARES)
    weights = list(MOST_USED_SHARES[:size])
    weights += [
        MOST_USED_SHARES[-1] * (last / rank) ** TAIL_EXPONENT for rank in range(last + 1, size + 1)
    ]
    total = sum(weights)
    return [weight / total for weight in weights]


def thesis(size: int, rate: int, minutes: int, pattern: Pattern, seed: int) -> Workload:
    """Section 5.1: the same number every minute, in the functions' proportions, in random order."""
    _positive("rate", rate)
    _positive("minutes", minutes)
    counts = [apportion(popularity(size), rate) for _ in range(minutes)]
    return spread(counts, pattern, seed)


def spread(counts: Sequence[Sequence[int]], pattern: Pattern, seed: int) -> Workload:
    """A workload from each minute's requests by function, the most used function first."""
    models = working_set(len(counts[0]) if counts else 0)
    random = Random(seed)
    arrivals: list[tuple[float, ModelId]] = []
    for minute, by_function in enumerate(counts):
        asked = [
            model.id
            for model, number in zip(models, by_function, strict=True)
            for _ in range(number)
        ]
        random.shuffle(asked)
        arrivals.extend(zip(pattern.times(minute, len(asked), random), asked, strict=True))
    return Workload(tuple(dict.fromkeys(models)), tuple(arrivals))


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these proportions that sum to `total` (largest remainders)."""
    whole = sum(weights)
    if whole <= 0:
        return [0] * len(weights)
    exact = [weight * total / whole for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise BadWorkload(f"{name} must be at least 1, not {value}")


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
