"""Progress lines for a waiting caller: where its request waits, and behind how many."""

from asyncio import Queue, Task, get_running_loop
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from common.time_limits import time_limit
from scheduler.core.state.pending import Standing
from scheduler.model.actions import EnqueueLocally
from scheduler.model.values import RequestId
from scheduler.service.history.history import Decided
from scheduler.service.leadership.term import Office

_REPEAT_S = 1.0

Line = Callable[[Mapping[str, Any]], Awaitable[None]]


class WaitProgress:
    """Writes a line at every decision about one request, and every second while it waits."""

    def __init__(self, office: Office, request: RequestId, line: Line) -> None:
        self._office = office
        self._request = request
        self._line = line
        self._decisions: Queue[Decided] = Queue()
        self._writing: Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._office.history.watch(self._request, self._decisions.put_nowait)
        self._writing = get_running_loop().create_task(self._write_lines())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._office.history.unwatch(self._request, self._decisions.put_nowait)
        assert self._writing is not None
        self._writing.cancel()
        self._writing = None  # a cancelled task refers to all that it worked with

    async def _write_lines(self) -> None:
        while True:
            await self._line(self._waits())
            try:
                async with time_limit(_REPEAT_S):
                    decided = await self._decisions.get()
            except TimeoutError:
                continue
            if isinstance(decided.action, EnqueueLocally):
                await self._line(_queued(decided.action))

    def _waits(self) -> Mapping[str, Any]:
        core = self._office.core
        pending = core.requests.get(self._request)
        local = pending is not None and pending.standing is Standing.LOCAL
        queued = core.placer.queued
        if not self._office.has_gpus:
            return {"state": "waiting", "for": "a GPU to attach", "waiting": queued}
        at = pending.at if pending is not None and local else None
        return {"state": "waiting", "for": at or "any GPU", "waiting": queued}


def _queued(action: EnqueueLocally) -> Mapping[str, Any]:
    return {"state": "queued", "slot": action.slot, "rule": action.rule}
