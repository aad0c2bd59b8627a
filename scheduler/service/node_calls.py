"""What GPU managers ask through their streams: leases, pins and evictions, how things stand."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from cache_manager.model import NodeId
from scheduler.errors import BadValue, SchedulerError
from scheduler.model import Placement, Request
from scheduler.refusals import refusal
from scheduler.service.driver import Driver
from scheduler.status import Status
from scheduler.stream import Acquire, Answer, Ask, Survey, Wanted

Call = Acquire | Wanted | Ask | Survey


class Calls:
    """The calls of one manager that are not answered yet; `answer` takes the answers."""

    def __init__(
        self,
        node: NodeId,
        driver: Driver,
        now_s: Callable[[], float],
        answer: Callable[[Answer], None],
        addresses: Callable[[NodeId], tuple[str, ...]],
    ) -> None:
        self._node = node
        self._addresses = addresses
        self._driver = driver
        self._now_s = now_s
        self._answer = answer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, call: Call) -> None:
        """See to it that the call is answered, now or later."""
        if call.call in self._tasks:
            raise BadValue(f"call {call.call} is there twice")
        task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks[call.call] = task
        task.add_done_callback(lambda _: self._tasks.pop(call.call, None))

    def close(self) -> None:
        """Answer nothing any more."""
        for task in self._tasks.values():
            task.cancel()

    async def _serve(self, call: Call) -> None:
        try:
            answer = await self._answered(call)
        except SchedulerError as error:
            answer = Answer(call.call, refusal=refusal(error))
        self._answer(answer)

    async def _answered(self, call: Call) -> Answer:
        driver, number = self._driver, call.call
        if isinstance(call, Acquire):
            request = _here(call.request, self._now_s())
            return self._placed(number, await driver.acquire(request))
        if isinstance(call, Wanted):
            return self._placed(number, await driver.wanted(call.request))
        if isinstance(call, Survey):
            return Answer(number, status=self._survey())
        await self._order(call)
        return Answer(number)

    def _placed(self, number: int, placement: Placement) -> Answer:
        """With the addresses of a node that the caller may not know."""
        away = placement.node != self._node
        addresses = self._addresses(placement.node) if away else ()
        return Answer(number, placement, addresses=addresses)

    def _order(self, call: Ask) -> Coroutine[Any, Any, None]:
        orders = {"pin": self._driver.pin, "unpin": self._driver.unpin, "evict": self._driver.evict}
        if call.do not in orders:
            raise BadValue(f"nobody can do {call.do[:80]!r}")
        return orders[call.do](call.model, call.gpu)

    def _survey(self) -> Status:
        """Counts of the whole cluster, and the GPUs of this node."""
        status = self._driver.status()
        gpus = tuple(gpu for gpu in status.gpus if gpu.node == self._node)
        return replace(status, gpus=gpus)


def _here(request: Request, now_s: float) -> Request:
    """The request in this scheduler's time."""
    deadline_s, arrived_s = request.deadline_s, request.arrived_s
    return request._replace(
        deadline_s=None if deadline_s is None else now_s + deadline_s,
        arrived_s=None if arrived_s is None else max(0.0, min(now_s, now_s + arrived_s)),
    )
