"""What came of a load's calls, and the figures that are made of it; pure."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from scheduler.sim.tally import percentile

_OK_FROM, _OK_TO = 200, 300
NO_ANSWER = "no answer"


@dataclass(frozen=True, slots=True)
class Latency:
    """Of calls that went well, from when they were due until their answer was complete."""

    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float
    average_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What some calls came to; `latency` is None where none went well."""

    calls: int
    succeeded: int
    statuses: dict[str, int]
    latency: Latency | None


@dataclass(frozen=True, slots=True)
class Cache:
    """What the scheduler counted meanwhile, whoever asked."""

    hits: int
    misses: int
    evictions: int

    @property
    def hit_ratio(self) -> float | None:
        """Of the leases that were given; None where there were none."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None

    def since(self, before: "Cache") -> "Cache":
        """What came since then; after a change of the leader, what the new one counted."""
        if self.hits < before.hits or self.misses < before.misses:
            return self
        return Cache(
            self.hits - before.hits,
            self.misses - before.misses,
            max(0, self.evictions - before.evictions),
        )


@dataclass(slots=True)
class Tally:
    """Every call that ended, in the order of its end; times count from the beginning."""

    functions: Sequence[str]
    due_s: "array[float]" = field(default_factory=lambda: array("d"))
    latency_s: "array[float]" = field(default_factory=lambda: array("d"))
    function: "array[int]" = field(default_factory=lambda: array("L"))
    status: "array[int]" = field(default_factory=lambda: array("H"))
    reasons: Counter[str] = field(default_factory=Counter)
    begun: int = 0

    def add(self, function: int, due_s: float, latency_s: float, status: int, why: str) -> None:
        """One more; status 0 is no answer, for this reason."""
        self.function.append(function)
        self.due_s.append(due_s)
        self.latency_s.append(latency_s)
        self.status.append(status)
        if not status:
            self.reasons[why] += 1

    def __len__(self) -> int:
        return len(self.status)

    @property
    def unfinished(self) -> int:
        """Calls that had not ended when it was over."""
        return self.begun - len(self)

    def figures(self) -> Figures:
        """Of all."""
        return self._figures(range(len(self)))

    def by_function(self) -> dict[str, Figures]:
        """Of each function that was called."""
        places: list[list[int]] = [[] for _ in self.functions]
        for place, function in enumerate(self.function):
            places[function].append(place)
        return {
            name: self._figures(own)
            for name, own in zip(self.functions, places, strict=True)
            if own
        }

    def lately(self, since: int) -> tuple[list[float], int]:
        """Of the calls from this one on: times of those that went well, and how many did not."""
        places = range(since, len(self))
        good = sorted(self.latency_s[place] for place in places if self.went_well(place))
        return good, len(places) - len(good)

    def went_well(self, place: int) -> bool:
        """Whether that call was answered with a status of success."""
        return _OK_FROM <= self.status[place] < _OK_TO

    def _figures(self, places: Sequence[int]) -> Figures:
        counts = Counter(self.status[place] for place in places)
        statuses = {str(code) if code else NO_ANSWER: n for code, n in sorted(counts.items())}
        good = [self.latency_s[place] for place in places if self.went_well(place)]
        return Figures(len(places), len(good), statuses, latency(good))


def latency(times_s: Iterable[float]) -> Latency | None:
    """Percentiles of these; None of none."""
    ordered = sorted(times_s)
    if not ordered:
        return None
    p50_s, p90_s, p95_s, p99_s = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Latency(p50_s, p90_s, p95_s, p99_s, ordered[-1], fmean(ordered))
