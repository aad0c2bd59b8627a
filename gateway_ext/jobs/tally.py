"""What a queue has now, counted as it changes: by function, in bytes, and the dead; pure."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from gateway_ext.errors import Busy
from gateway_ext.jobs.model import Counts, Kind
from gateway_ext.model import FunctionId

_RETRY_AFTER_S = 5.0
_SLACK = 1_000


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much is kept: of one body, of what waits, and of what is dead.

    Up to `inline_bytes` a body is kept with its job. Of `waiting_bytes` one function may take half.
    """

    body_bytes: int = 64 << 20
    inline_bytes: int = 1 << 20
    waiting: int = 250_000
    waiting_per_function: int = 100_000
    waiting_bytes: int = 16 << 30
    dead: int = 10_000
    dead_bytes: int = 4 << 30
    dead_age_s: float = 30 * 24 * 3600.0


class _Alive(NamedTuple):
    function: FunctionId
    kind: Kind
    size_bytes: int
    queued_at_s: float


class _Dead(NamedTuple):
    size_bytes: int
    died_at_s: float


class Room:
    """Room for one call that comes; see `Tally.room`."""

    def __init__(self, grow: Callable[[int], None]) -> None:
        self._grow = grow
        self.size_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """It is at least so much; Busy where there is no room for that."""
        more_bytes = size_bytes - self.size_bytes
        if more_bytes > 0:
            self._grow(more_bytes)
            self.size_bytes = size_bytes


class Tally:
    """Jobs that are kept, by number; whoever keeps them tells of every change."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._alive: dict[int, _Alive] = {}
        self._dead: dict[int, _Dead] = {}
        # Those that were asked for first come first; some are gone by now.
        self._queued: list[tuple[float, int]] = []
        self._coming: Counter[FunctionId] = Counter()
        self._coming_bytes: Counter[FunctionId] = Counter()
        self._bytes_of: Counter[FunctionId] = Counter()
        self.calls: Counter[FunctionId] = Counter()
        self.callbacks = 0
        self.alive_bytes = 0
        self.dead_bytes = 0

    @property
    def dead(self) -> int:
        """How many are dead."""
        return len(self._dead)

    @property
    def oldest_queued_at_s(self) -> float | None:
        """When the one that has been here longest was asked for; None where nothing waits."""
        while self._queued and self._queued[0][1] not in self._alive:
            heappop(self._queued)
        return self._queued[0][0] if self._queued else None

    @property
    def most_bytes(self) -> int:
        """What all of it may come to, results on their way included."""
        return 2 * (self._limits.waiting_bytes + self._limits.dead_bytes)

    def fit(self, store_bytes: int) -> None:
        """Whoever keeps it has so much room; a quarter of it is for results. -1 is no bound."""
        if store_bytes >= 0:
            limits = self._limits
            self._limits = replace(
                limits,
                waiting_bytes=min(limits.waiting_bytes, store_bytes // 2),
                dead_bytes=min(limits.dead_bytes, store_bytes // 4),
            )

    def counts(self) -> Counts:
        """How many there are of each."""
        return Counts(dict(self.calls), self.callbacks, self.dead)

    @contextmanager
    def room(self, function: FunctionId, size_bytes: int) -> Iterator[Room]:
        """Room for one call more while it comes or is being kept; Busy where there is none.

        All of it counts, its headers too. What is not known to be that large may grow (`hold`).
        """
        limits = self._limits
        if (
            self.calls[function] + self._coming[function] >= limits.waiting_per_function
            or len(self._alive) + self._coming.total() >= limits.waiting
        ):
            raise Busy(function, _RETRY_AFTER_S)
        room = Room(partial(self._reserve, function))
        room.hold(size_bytes)
        self._coming[function] += 1
        try:
            yield room
        finally:
            _less(self._coming, function, 1)
            _less(self._coming_bytes, function, room.size_bytes)

    def keep(
        self, number: int, function: FunctionId, kind: Kind, size_bytes: int, queued_at_s: float
    ) -> None:
        """This one is here, or is now so."""
        before = self._alive.get(number)
        if before is not None:
            self._uncount(before)
        else:
            self._note(number, queued_at_s)
        one = self._alive[number] = _Alive(function, kind, size_bytes, queued_at_s)
        if kind is Kind.CALL:
            self.calls[function] += 1
        else:
            self.callbacks += 1
        self._bytes_of[function] += size_bytes
        self.alive_bytes += one.size_bytes

    def drop(self, number: int) -> None:
        """It is alive no more."""
        one = self._alive.pop(number, None)
        if one is not None:
            self._uncount(one)

    def bury(self, number: int, size_bytes: int, died_at_s: float) -> None:
        """It is dead."""
        self.drop(number)
        self.unearth(number)
        self._dead[number] = _Dead(size_bytes, died_at_s)
        self.dead_bytes += size_bytes

    def unearth(self, number: int) -> None:
        """It is not among the dead any more."""
        one = self._dead.pop(number, None)
        if one is not None:
            self.dead_bytes -= one.size_bytes

    def overdue(self, now_s: float) -> list[int]:
        """The dead that are to be forgotten, those that died first before the others."""
        limits, found = self._limits, []
        count, size_bytes = self.dead, self.dead_bytes
        for number, one in sorted(self._dead.items(), key=lambda item: item[1].died_at_s):
            old = now_s - one.died_at_s > limits.dead_age_s
            if not (old or count > limits.dead or size_bytes > limits.dead_bytes):
                break
            found.append(number)
            count -= 1
            size_bytes -= one.size_bytes
        return found

    def _reserve(self, function: FunctionId, more_bytes: int) -> None:
        most_bytes, coming = self._limits.waiting_bytes, self._coming_bytes
        own_bytes = self._bytes_of[function] + coming[function] + more_bytes
        all_bytes = self.alive_bytes + coming.total() + more_bytes
        if all_bytes > most_bytes or own_bytes > most_bytes // 2:
            raise Busy(function, _RETRY_AFTER_S)
        coming[function] += more_bytes

    def _note(self, number: int, queued_at_s: float) -> None:
        if len(self._queued) > 2 * len(self._alive) + _SLACK:
            self._queued = [(one.queued_at_s, known) for known, one in self._alive.items()]
            heapify(self._queued)
        heappush(self._queued, (queued_at_s, number))

    def _uncount(self, one: _Alive) -> None:
        if one.kind is Kind.CALL:
            _less(self.calls, one.function, 1)
        else:
            self.callbacks -= 1
        _less(self._bytes_of, one.function, one.size_bytes)
        self.alive_bytes -= one.size_bytes


def _less(counter: Counter[FunctionId], function: FunctionId, by: int) -> None:
    """Zero is not kept: functions come and go."""
    counter[function] -= by
    if counter[function] <= 0:
        del counter[function]
