"""The calls of GPU managers over their streams: leases, pins, evictions, surveys."""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from cache_manager.model.ids import NodeId
from common.tasks import BackgroundTasks
from scheduler.model.errors import BadValue, SchedulerError
from scheduler.model.values import Placement
from scheduler.service.driver.driver import Driver
from scheduler.wire.cluster_status import Status
from scheduler.wire.node_stream import Acquire, Answer, Ask, Locate, Survey, Wanted
from scheduler.wire.refusals import refusal
from scheduler.wire.request_times import absolute

log = logging.getLogger(__name__)

NodeCall = Acquire | Wanted | Ask | Survey | Locate


class NodeCalls:
    """The unanswered calls of one manager; the callback `answer` sends the answers."""

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
        self._tasks = BackgroundTasks(log, f"a call of node {node}")
        self._open: set[int] = set()

    def begin(self, call: NodeCall) -> None:
        """Answer the call, now or later."""
        if call.call in self._open:
            raise BadValue(f"call {call.call} is pending already")
        self._open.add(call.call)
        task = self._tasks.start(self._serve(call))
        task.add_done_callback(lambda _: self._open.discard(call.call))

    def close(self) -> None:
        """Cancel every call without an answer."""
        self._tasks.cancel()

    async def _serve(self, call: NodeCall) -> None:
        try:
            answer = await self._answered(call)
        except SchedulerError as error:
            answer = Answer(call.call, refusal=refusal(error))
        self._answer(answer)

    async def _answered(self, call: NodeCall) -> Answer:
        driver, number = self._driver, call.call
        if isinstance(call, Acquire):
            request = absolute(call.request, self._now_s())
            return self._placed(number, await driver.acquire(request))
        if isinstance(call, Wanted):
            return self._placed(number, await driver.wanted(call.request))
        if isinstance(call, Survey):
            return Answer(number, status=self._survey())
        if isinstance(call, Locate):
            return Answer(number, addresses=self._addresses(call.node))
        await self._order(call)
        return Answer(number)

    def _placed(self, number: int, placement: Placement) -> Answer:
        """The placement, with the addresses of a node that the caller may not know."""
        away = placement.node != self._node
        addresses = self._addresses(placement.node) if away else ()
        return Answer(number, placement, addresses=addresses)

    def _order(self, call: Ask) -> Coroutine[Any, Any, None]:
        orders = {"pin": self._driver.pin, "unpin": self._driver.unpin, "evict": self._driver.evict}
        if call.do not in orders:
            raise BadValue(f"no such order: {call.do[:80]!r}")
        return orders[call.do](call.model, call.gpu)

    def _survey(self) -> Status:
        """Counts of the whole cluster, and the GPUs of this node."""
        status = self._driver.status()
        gpus = tuple(gpu for gpu in status.gpus if gpu.node == self._node)
        return replace(status, gpus=gpus)
