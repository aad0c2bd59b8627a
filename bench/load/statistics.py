"""The calls of a load, and figures of them; pure."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from scheduler.sim.simulation_tally import percentile

_OK_FROM, _OK_TO = 200, 300
NO_ANSWER = "no answer"
_MOST_REASONS = 100


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of successful calls, from due to the end of the answer."""

    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float
    average_s: float


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Figures of some calls; `latency` is None if none succeeded."""

    calls: int
    succeeded: int
    statuses: dict[str, int]
    latency: Latency | None


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """The scheduler's counts, which include those of other callers."""

    hits: int
    misses: int
    evictions: int

    @property
    def hit_ratio(self) -> float | None:
        """The share of leases that were hits; None without leases."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None

    def since(self, before: "CacheCounts") -> "CacheCounts":
        """The difference; after a change of the leader, the new leader's counts."""
        if self.hits < before.hits or self.misses < before.misses:
            return self
        return CacheCounts(
            self.hits - before.hits,
            self.misses - before.misses,
            max(0, self.evictions - before.evictions),
        )


@dataclass(slots=True)
class CallTally:
    """The calls in the order of their ends; times are seconds since the beginning."""

    functions: Sequence[str]
    due_s: "array[float]" = field(default_factory=lambda: array("d"))
    latency_s: "array[float]" = field(default_factory=lambda: array("d"))
    function: "array[int]" = field(default_factory=lambda: array("L"))
    status: "array[int]" = field(default_factory=lambda: array("H"))
    reasons: Counter[str] = field(default_factory=Counter)
    begun: int = 0

    def add(self, function: int, due_s: float, latency_s: float, status: int, reason: str) -> None:
        """Add a call; status 0 means no answer, for this reason; failures may have one, too."""
        self.function.append(function)
        self.due_s.append(due_s)
        self.latency_s.append(latency_s)
        self.status.append(status)
        if reason or not status:
            known = reason in self.reasons or len(self.reasons) < _MOST_REASONS
            self.reasons[reason if known else "other reasons"] += 1

    def __len__(self) -> int:
        return len(self.status)

    @property
    def unfinished(self) -> int:
        """The number of calls without an end."""
        return self.begun - len(self)

    def figures(self) -> CallFigures:
        """Figures of all calls."""
        return self._figures(range(len(self)))

    def by_function(self) -> dict[str, CallFigures]:
        """Figures of each function that was called."""
        places: list[list[int]] = [[] for _ in self.functions]
        for place, function in enumerate(self.function):
            places[function].append(place)
        return {
            name: self._figures(own)
            for name, own in zip(self.functions, places, strict=True)
            if own
        }

    def latest(self, since: int) -> tuple[list[float], int]:
        """From this index on: sorted latencies of successful calls, and the number of failures."""
        places = range(since, len(self))
        good = sorted(self.latency_s[place] for place in places if self.succeeded(place))
        return good, len(places) - len(good)

    def succeeded(self, place: int) -> bool:
        """Whether the call at this index has a status of success."""
        return _OK_FROM <= self.status[place] < _OK_TO

    def _figures(self, places: Sequence[int]) -> CallFigures:
        counts = Counter(self.status[place] for place in places)
        statuses = {str(code) if code else NO_ANSWER: n for code, n in sorted(counts.items())}
        good = [self.latency_s[place] for place in places if self.succeeded(place)]
        return CallFigures(len(places), len(good), statuses, latency(good))


def latency(times_s: Iterable[float]) -> Latency | None:
    """Percentiles of the times; None without times."""
    ordered = sorted(times_s)
    if not ordered:
        return None
    p50_s, p90_s, p95_s, p99_s = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Latency(p50_s, p90_s, p95_s, p99_s, ordered[-1], fmean(ordered))
