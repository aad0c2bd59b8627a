"""What the workers ask of a job queue. What it said it has done survives the process's death."""

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway_ext.jobs.bodies import Body
from gateway_ext.jobs.model import (
    Call,
    DeadLetter,
    Head,
    Job,
    JobNumber,
    Kind,
    Lane,
    Result,
)
from gateway_ext.jobs.tally import Tally


class Spool(Protocol):
    """A body on its way into the queue, wherever it is kept."""

    @property
    def size_bytes(self) -> int:
        """How much has been written."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Add to it; TooLarge beyond the queue's limit."""
        ...

    async def discard(self) -> None:
        """It is not needed; of no effect on one that a job has."""
        ...


class JobQueue(Protocol):
    """Jobs that wait, are claimed, or dead. What it cannot do is raised as QueueFailed.

    A claimed job is the claimer's until it says what became of it; ClaimLost where it is not (any
    more). What a dead process had claimed is claimed by nobody.
    """

    @property
    def tally(self) -> Tally:
        """What there is; known at once, without waiting."""
        ...

    @property
    def away(self) -> bool:
        """Whether it cannot be reached now."""
        ...

    def watch(self, told: Callable[[], None]) -> None:
        """Call this, in the event loop, whenever something waits that did not before."""
        ...

    def spool(self) -> Spool:
        """Begin a body."""
        ...

    async def put(self, call: Call, body: Spool) -> bool:
        """Keep a call for good; False where one of the same id and function is kept already.

        Busy where there are too many.
        """
        ...

    async def heads(self, kind: Kind) -> Sequence[Head]:
        """The lanes in which something waits, due or not."""
        ...

    async def claim(self, lanes: Sequence[Lane], now_s: float) -> Sequence[Job]:
        """Take the first due job of each of these lanes; one that is named twice gives two."""
        ...

    async def again(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        """Let a claimed job wait until then; `counts` says whether that was an attempt."""
        ...

    async def answered(
        self, job: JobNumber, result: Result, body: Spool, lane: Lane, due_at_s: float
    ) -> None:
        """A claimed call has its result, and waits in this lane to be called back with it."""
        ...

    async def done(self, job: JobNumber) -> None:
        """Forget a claimed job."""
        ...

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        """Make a dead letter of a claimed job; `status` is what was answered last."""
        ...

    async def dead(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Dead letters with higher numbers than `after`, lowest first."""
        ...

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, Body]:
        """One of them, with the body of its call; UnknownJob where there is none."""
        ...

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Let a dead letter wait again, as if nothing had been tried; JobExists, UnknownJob.

        One whose callback alone failed is only called back.
        """
        ...

    async def discard(self, number: JobNumber) -> None:
        """Forget a dead letter; UnknownJob where there is none."""
        ...

    async def expire(self, now_s: float) -> int:
        """Forget the dead letters that are too old, or too many; how many those were."""
        ...

    async def close(self) -> None:
        """Keep what there is, and do nothing any more."""
        ...
