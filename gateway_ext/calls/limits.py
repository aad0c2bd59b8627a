"""Bounds of a call: sizes, times and a function's queue; settings of the invocation path."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from common.http.client import ClientSettings
from gateway_ext.calls import passed_headers
from gateway_ext.errors import Busy, GatewayError
from gateway_ext.model import FunctionId

Seat = TypeVar("Seat")


@dataclass(frozen=True, slots=True)
class InvokeSettings:
    """Bounds of the invocation path; a function's own bounds are in its options."""

    max_body_bytes: int = 512 << 20
    # An arriving body is held up to this size while its call waits for an instance.
    read_ahead_bytes: int = 1 << 20
    # How long a call waits for a function without an instance.
    wake_s: float = 60.0
    connect_s: float = 2.0
    # Attempts for a call that cannot have reached the function, or that is declared repeatable.
    attempts: int = 3
    # How long an unused connection to an instance is kept.
    idle_s: float = 30.0

    @property
    def client(self) -> ClientSettings:
        return ClientSettings(
            connect_s=self.connect_s,
            idle_s=self.idle_s,
            trailers=passed_headers.REPORTED,
        )


class CallPart(NamedTuple):
    """A call that is a stage of a workflow: it may take `within_s`, and should take `slo_s`.

    One that comes `later`, after others of its run, may wait for all of `within_s`: a refusal would
    waste what those have computed.
    """

    workflow: str
    stage: str
    within_s: float
    slo_s: float | None = None
    later: bool = False


class Turns(Generic[Seat]):
    """Calls that wait for a seat of one function, served in their order."""

    def __init__(self, function: FunctionId) -> None:
        self._function = function
        self._waiting: deque[asyncio.Future[Seat]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(
        self, most: int, give_back: Callable[[Seat], None], expected_s: float = 0.0
    ) -> Seat:
        """Wait until a seat is assigned; Busy if `most` calls wait already.

        A call that is refused should come again after `expected_s`.
        """
        if len(self._waiting) >= most:
            raise Busy(self._function, expected_s)
        turn: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                give_back(turn.result())  # the seat was assigned while the call was being cancelled
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def hand_out(self, take: Callable[[], Seat | None]) -> None:
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            seat = take()
            if seat is None:
                return
            self._waiting.popleft().set_result(seat)

    def fail(self, error: GatewayError) -> None:
        """Raise this error in every waiting call: no further seat will be assigned."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)
