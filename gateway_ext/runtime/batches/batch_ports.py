"""What a batch needs of its calls, and of the process that serves them."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway_ext.runtime.call_deadlines import CallDeadline, CallDeadlines
from gateway_ext.runtime.gpu_placement import NoPlacements
from gateway_ext.runtime.handler.handler_data import HandlerData
from gateway_ext.runtime.handler.handler_event import HandlerEvent
from gateway_ext.runtime.handler.handler_failure import HandlerErrors
from gateway_ext.runtime.handler.handler_response import HandlerResponse
from gateway_ext.runtime.handler_threads import HandlerThreads
from gateway_ext.runtime.loop_mailbox import LoopMailbox


class BatchHolder(Protocol):
    """Whoever has a call: those that wait, or the batch that it is in."""

    def left(self, call: "BatchMember") -> None:
        """The call is over before it was answered; called in the loop."""
        ...


class BatchMember(Protocol):
    """One call that the handler is given with others."""

    event: HandlerEvent
    deadline: CallDeadline
    holder: BatchHolder | None

    @property
    def over(self) -> bool:
        """Whether the call needs no answer any more; any thread may ask."""
        ...

    def begins_in_batch(self, members: int) -> None:
        """The handler is called with so many calls, this one among them."""
        ...

    def ends_in_batch(self, below: list[str]) -> None:
        """The handler has returned; `below` are the times of the batch's graph calls."""
        ...

    def answer_from_batch(self, answer: HandlerResponse) -> None:
        """Send the call's answer; called in the batch's thread."""
        ...

    def fail_in_batch(self, error: BaseException) -> None:
        """Answer 500 because of this error; called in the batch's thread."""
        ...

    def log_line(self, what: str) -> None:
        """Log what happened to the call; any thread may call this."""
        ...


class BatchServices(Protocol):
    """What the calls of one process share."""

    loop: asyncio.AbstractEventLoop
    mailbox: LoopMailbox
    deadlines: CallDeadlines
    threads: HandlerThreads
    gpu: NoPlacements
    data: HandlerData
    errors: HandlerErrors
    hostname: str
    in_threads: set[object]

    @property
    def stuck(self) -> Callable[[int], None]:
        """Note that a batch that timed out holds a thread (+1), or no longer does (-1)."""
        ...
