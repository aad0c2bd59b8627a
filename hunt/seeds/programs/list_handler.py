"""A handler that takes a list of calls, in a simulation: the runtime's own gathering of calls."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway_ext.runtime.batches import BatchSettings, GatheredCalls
from gateway_ext.runtime.calls import HandlerCall
from hunt.seeds.programs.manager_link import FAILURES

# Computes for a call, or for a list of calls, with the address and the lease that it brought, and
# until when it is awaited.
Compute = Callable[[str, str, float], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class ListedEvent:
    """As much of a call as decides with which ones it is handled."""

    headers: dict[str, str]


class ListedCall:
    """One call that waits for its list, or is in one; a `HandlerCall` as far as it is used here."""

    def __init__(self, address: str, token: str, ends_s: float) -> None:
        self.address = address
        self.token = token
        self.ends_s = ends_s
        self.event = ListedEvent({"x-gpu-lease": token} if token else {})
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hold(self, leave: Callable[[HandlerCall], None]) -> None:
        """Nothing to note: `SimulatedListHandler` itself says when its client leaves."""

    def end(self, error: Exception | None) -> None:
        """Its list has ended, unless it was given up before."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class SimulatedListHandler:
    """Handles up to `most` calls at a time; where a list fails, each of its calls is made alone."""

    def __init__(self, most: int, compute: Compute) -> None:
        self._compute = compute
        loop = asyncio.get_running_loop()
        self._gathered = GatheredCalls(loop, BatchSettings(most), self._start)
        self._running: set[asyncio.Task[None]] = set()

    async def handle(self, address: str, token: str, ends_s: float) -> None:
        """Return when the list with this call was handled; one of FAILURES if it failed."""
        call = ListedCall(address, token, ends_s)
        member = cast(HandlerCall, call)
        self._gathered.add(member)
        try:
            await call.ended
        except asyncio.CancelledError:
            self._gathered.left(member)
            raise

    def _start(self, members: Sequence[HandlerCall], ended: Callable[[], None]) -> None:
        calls = cast(Sequence[ListedCall], members)
        task = asyncio.get_running_loop().create_task(self._run(calls))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: ended())

    async def _run(self, calls: Sequence[ListedCall]) -> None:
        ends_s = max(call.ends_s for call in calls)
        error = await self._tried(calls[0], ends_s)
        if error is None or len(calls) == 1:
            for call in calls:
                call.end(error)
            return
        for call in calls:
            if not call.ended.done():
                call.end(await self._tried(call, ends_s))

    async def _tried(self, call: ListedCall, ends_s: float) -> Exception | None:
        try:
            await self._compute(call.address, call.token, ends_s)
        except FAILURES as error:
            return error
        return None
