"""The time limit of all calls: one timer for the oldest, not one for each."""

import asyncio
import math
from typing import Protocol


class LimitedCall(Protocol):
    """A call that may take only so long."""

    def time_out(self) -> None: ...


class CallDeadline:
    """When a call's time is up, and until when somebody waits for its answer."""

    __slots__ = ("_awaited_until_s", "_loop", "due_s")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit_s: float, awaited_until_s: float
    ) -> None:
        self.due_s = loop.time() + limit_s
        self._awaited_until_s = awaited_until_s
        self._loop = loop

    def nobody_waits(self) -> None:
        """The client has left."""
        self._awaited_until_s = -math.inf

    @property
    def until_s(self) -> float:
        """Until when the call may wait; inf without a limit. From any thread."""
        return min(self.due_s, self._awaited_until_s)

    def left_s(self) -> float | None:
        """The seconds that the call may still wait; None without a limit. From any thread."""
        return seconds_until(self.until_s, self._loop)


def seconds_until(until_s: float, loop: asyncio.AbstractEventLoop) -> float | None:
    """The seconds until then, 0 at least; None if that is never (inf). From any thread."""
    return None if until_s == math.inf else max(0.0, until_s - loop.time())


class CallDeadlines:
    """The calls whose time runs, the oldest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Without a limit (0) no call is ever timed out."""
        self.limit_s = limit_s
        self._loop = loop
        self._due_s: dict[LimitedCall, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: LimitedCall, awaited_until_s: float = math.inf) -> CallDeadline:
        """Let the call's time run from now on; the gateway waits until then for its answer."""
        deadline = CallDeadline(self._loop, self.limit_s or math.inf, awaited_until_s)
        if self.limit_s:
            self._due_s[call] = deadline.due_s
            if self._timer is None:
                self._timer = self._loop.call_at(deadline.due_s, self._look)
        return deadline

    def remove(self, call: LimitedCall) -> None:
        """Never time the call out; any thread may call this."""
        self._due_s.pop(call, None)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for call in list(self._due_s):  # a copy, as threads remove their calls meanwhile
            due_s = self._due_s.get(call)
            if due_s is None:
                continue
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._look)
                return
            if self._due_s.pop(call, None) is not None:
                call.time_out()
