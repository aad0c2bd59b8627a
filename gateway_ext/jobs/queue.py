"""The port of a job queue, whose confirmed changes survive the process, and its counts."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from gateway_ext.errors import Busy, UnknownJob
from gateway_ext.jobs.body_buffer import BodyBuffer
from gateway_ext.jobs.values import (
    AsyncCall,
    CallResult,
    DeadLetter,
    Job,
    JobKind,
    JobLane,
    JobNumber,
    LaneHead,
    StoredBody,
)
from gateway_ext.model import FunctionId

_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits on one body, on waiting jobs and on dead letters."""

    body_bytes: int = 64 << 20
    inline_bytes: int = 1 << 20  # up to which a body is stored with its job
    waiting: int = 250_000
    waiting_per_function: int = 100_000
    waiting_bytes: int = 16 << 30  # half of it for one function
    dead: int = 10_000
    dead_bytes: int = 4 << 30
    dead_age_s: float = 30 * 24 * 3600.0


class _Alive(NamedTuple):
    function: FunctionId
    kind: JobKind
    size_bytes: int
    queued_at_s: float


class _Dead(NamedTuple):
    size_bytes: int
    died_at_s: float


class JobTally:
    """Counts jobs by number; the queue that keeps the jobs reports every change."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._alive: dict[int, _Alive] = {}
        self._dead: dict[int, _Dead] = {}
        self._coming: Counter[FunctionId] = Counter()
        self._coming_bytes: Counter[FunctionId] = Counter()
        self._bytes_of: Counter[FunctionId] = Counter()
        self.calls: Counter[FunctionId] = Counter()
        self.callbacks = 0
        self.alive_bytes = 0
        self.dead_bytes = 0

    @property
    def dead(self) -> int:
        return len(self._dead)

    @property
    def oldest_queued_at_s(self) -> float | None:
        return min((job.queued_at_s for job in self._alive.values()), default=None)

    @property
    def capacity_bytes(self) -> int:
        """The most that jobs, dead letters and arriving results may take together."""
        return 2 * (self._limits.waiting_bytes + self._limits.dead_bytes)

    def limit_to(self, store_bytes: int) -> None:
        """Lower the limits to a store of this size, a quarter of it for results; -1: unlimited."""
        if store_bytes >= 0:
            limits = self._limits
            self._limits = replace(
                limits,
                waiting_bytes=min(limits.waiting_bytes, store_bytes // 2),
                dead_bytes=min(limits.dead_bytes, store_bytes // 4),
            )

    @contextmanager
    def reserve(self, function: FunctionId, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Reserve space for one call while it arrives and is stored; Busy at a limit.

        Headers count as well. A call whose size is unknown reserves more in total by what this
        yields.
        """
        limits = self._limits
        if (
            self.calls[function] + self._coming[function] >= limits.waiting_per_function
            or len(self._alive) + self._coming.total() >= limits.waiting
        ):
            raise Busy(function, _RETRY_AFTER_S)
        reserved_bytes = 0

        def grow_to(size_bytes: int) -> None:
            nonlocal reserved_bytes
            if size_bytes > reserved_bytes:
                self._grow(function, size_bytes - reserved_bytes)
                reserved_bytes = size_bytes

        grow_to(size_bytes)
        self._coming[function] += 1
        try:
            yield grow_to
        finally:
            _less(self._coming, function, 1)
            _less(self._coming_bytes, function, reserved_bytes)

    def add(
        self, number: int, function: FunctionId, kind: JobKind, size_bytes: int, queued_at_s: float
    ) -> None:
        """Count a waiting or claimed job, or update one that is counted."""
        before = self._alive.get(number)
        if before is not None:
            self._uncount(before)
        self._alive[number] = _Alive(function, kind, size_bytes, queued_at_s)
        if kind is JobKind.CALL:
            self.calls[function] += 1
        else:
            self.callbacks += 1
        self._bytes_of[function] += size_bytes
        self.alive_bytes += size_bytes

    def remove(self, number: int) -> None:
        job = self._alive.pop(number, None)
        if job is not None:
            self._uncount(job)

    def add_dead(self, number: int, size_bytes: int, died_at_s: float) -> None:
        self.remove(number)
        self.remove_dead(number)
        self._dead[number] = _Dead(size_bytes, died_at_s)
        self.dead_bytes += size_bytes

    def remove_dead(self, number: int) -> None:
        letter = self._dead.pop(number, None)
        if letter is not None:
            self.dead_bytes -= letter.size_bytes

    def expired(self, now_s: float) -> list[int]:
        """The dead letters beyond the limits on age, number and bytes, oldest first."""
        limits, expired = self._limits, []
        count, size_bytes = self.dead, self.dead_bytes
        for number, letter in sorted(self._dead.items(), key=lambda item: item[1].died_at_s):
            old = now_s - letter.died_at_s > limits.dead_age_s
            if not (old or count > limits.dead or size_bytes > limits.dead_bytes):
                break
            expired.append(number)
            count -= 1
            size_bytes -= letter.size_bytes
        return expired

    def _grow(self, function: FunctionId, more_bytes: int) -> None:
        most_bytes, coming = self._limits.waiting_bytes, self._coming_bytes
        own_bytes = self._bytes_of[function] + coming[function] + more_bytes
        all_bytes = self.alive_bytes + coming.total() + more_bytes
        if all_bytes > most_bytes or own_bytes > most_bytes // 2:
            raise Busy(function, _RETRY_AFTER_S)
        coming[function] += more_bytes

    def _uncount(self, job: _Alive) -> None:
        if job.kind is JobKind.CALL:
            _less(self.calls, job.function, 1)
        else:
            self.callbacks -= 1
        _less(self._bytes_of, job.function, job.size_bytes)
        self.alive_bytes -= job.size_bytes


def _less(counter: Counter[FunctionId], function: FunctionId, by: int) -> None:
    """Remove an entry of zero, as functions come and go."""
    counter[function] -= by
    if counter[function] <= 0:
        del counter[function]


class JobQueue(Protocol):
    """Jobs that wait, are claimed, or are dead. A failure of the queue raises QueueFailed.

    A claimed job belongs to its claimer until the claimer ends the claim; a call that needs a claim
    and has none raises ClaimLost. Claims of a dead process are released.
    """

    tally: JobTally

    async def open(self) -> None:
        """Read what is stored; a server that is away is tried again in the background."""

    @property
    def away(self) -> bool:
        """Whether the store of the queue cannot be reached now."""

    def now_s(self) -> float:
        """The time, since 1970, on the clock by which jobs are stored and due."""

    def watch(self, notify: Callable[[], None]) -> None:
        """Call `notify` in the event loop whenever another job waits."""

    def spool(self) -> BodyBuffer: ...

    async def put(self, call: AsyncCall, body: BodyBuffer) -> bool:
        """Store a call durably; False where one with the same id and function is stored already.

        Busy at a limit.
        """

    async def heads(self, kind: JobKind) -> Sequence[LaneHead]:
        """The lanes with waiting jobs, due or not."""

    async def claim(self, lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
        """Claim the first due job of each of these lanes; a lane named twice gives two jobs."""

    async def reschedule(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        """End a claim, and try again at `due_at_s`; `counts` says whether this was an attempt."""

    async def store_result(
        self, job: JobNumber, result: CallResult, body: BodyBuffer, lane: JobLane, due_at_s: float
    ) -> None:
        """End the claim of a call with its result; the callback waits in this lane."""

    async def finish(self, job: JobNumber) -> None:
        """End a claim and remove the job."""

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        """End a claim and make the job a dead letter; `status` is that of the last answer."""

    async def dead_letters(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Letters with higher numbers than `after`, lowest first."""

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, StoredBody]:
        """Return the body of its call, too; raise UnknownJob where there is none."""

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Turn a dead letter into a waiting job without attempts; JobExists, UnknownJob.

        Where only the callback had failed, only the callback is repeated.
        """

    async def discard(self, number: JobNumber) -> None:
        """Raise UnknownJob where there is none."""

    async def expire(self, now_s: float) -> int:
        """Remove dead letters beyond the limits; return how many were removed."""
        gone = 0
        for number in self.tally.expired(now_s):
            with suppress(UnknownJob):  # it was discarded or replayed meanwhile
                await self.discard(JobNumber(number))
                gone += 1
        return gone

    async def close(self) -> None:
        """Close the queue; stored jobs stay."""


_Queue = TypeVar("_Queue", bound=JobQueue)


@asynccontextmanager
async def opened(queue: _Queue) -> AsyncIterator[_Queue]:
    """The queue, open while the context lasts."""
    try:
        await queue.open()
        yield queue
    finally:
        await queue.close()
