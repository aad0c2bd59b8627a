"""The port of a job queue. A change that a method has confirmed survives the process."""

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway_ext.jobs.queue.job_bodies import StoredBody
from gateway_ext.jobs.queue.job_tally import JobTally
from gateway_ext.jobs.queue.job_values import (
    AsyncCall,
    CallResult,
    DeadLetter,
    Job,
    JobKind,
    JobLane,
    JobNumber,
    LaneHead,
)


class BodySpool(Protocol):
    """A body on its way into the queue."""

    @property
    def size_bytes(self) -> int:
        """How much has been written."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Add to the body; TooLarge beyond the queue's limit."""
        ...

    async def discard(self) -> None:
        """Free the body's space; no effect on a body that belongs to a job."""
        ...


class JobQueue(Protocol):
    """Jobs that wait, are claimed, or are dead. A failure of the queue raises QueueFailed.

    A claimed job belongs to its claimer until the claimer ends the claim; a call that needs a claim
    and has none raises ClaimLost. Claims of a dead process are released.
    """

    @property
    def tally(self) -> JobTally:
        """The counts of now, without waiting."""
        ...

    @property
    def away(self) -> bool:
        """Whether the store of the queue cannot be reached now."""
        ...

    def now_s(self) -> float:
        """The time, since 1970, on the clock by which jobs are stored and due."""
        ...

    def watch(self, notify: Callable[[], None]) -> None:
        """Call `notify` in the event loop whenever another job waits."""
        ...

    def spool(self) -> BodySpool:
        """Start a body."""
        ...

    async def put(self, call: AsyncCall, body: BodySpool) -> bool:
        """Store a call durably; False where one with the same id and function is stored already.

        Busy at a limit.
        """
        ...

    async def heads(self, kind: JobKind) -> Sequence[LaneHead]:
        """The lanes with waiting jobs, due or not."""
        ...

    async def claim(self, lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
        """Claim the first due job of each of these lanes; a lane named twice gives two jobs."""
        ...

    async def reschedule(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        """End a claim, and try again at `due_at_s`; `counts` says whether this was an attempt."""
        ...

    async def store_result(
        self, job: JobNumber, result: CallResult, body: BodySpool, lane: JobLane, due_at_s: float
    ) -> None:
        """End the claim of a call with its result; the callback waits in this lane."""
        ...

    async def finish(self, job: JobNumber) -> None:
        """End a claim and remove the job."""
        ...

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        """End a claim and make the job a dead letter; `status` is that of the last answer."""
        ...

    async def dead_letters(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Dead letters with higher numbers than `after`, lowest first."""
        ...

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, StoredBody]:
        """One dead letter with the body of its call; UnknownJob where there is none."""
        ...

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Turn a dead letter into a waiting job without attempts; JobExists, UnknownJob.

        Where only the callback had failed, only the callback is repeated.
        """
        ...

    async def discard(self, number: JobNumber) -> None:
        """Remove a dead letter; UnknownJob where there is none."""
        ...

    async def expire(self, now_s: float) -> int:
        """Remove dead letters beyond the limits; how many were removed."""
        ...

    async def close(self) -> None:
        """Close the queue; stored jobs stay."""
        ...
