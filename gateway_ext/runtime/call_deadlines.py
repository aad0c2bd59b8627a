"""The time limit of all calls: one timer for the oldest, not one for each."""

import asyncio
from typing import Protocol


class LimitedCall(Protocol):
    """A call that may take only so long."""

    def time_out(self) -> None:
        """The call's time is up."""
        ...


class CallDeadlines:
    """The calls whose time runs, the oldest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Without a limit (0) no call is ever timed out."""
        self.limit_s = limit_s
        self._loop = loop
        self._due_s: dict[LimitedCall, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: LimitedCall) -> None:
        """Let the call's time run from now on."""
        if not self.limit_s:
            return
        due_s = self._due_s[call] = self._loop.time() + self.limit_s
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._look)

    def remove(self, call: LimitedCall) -> None:
        """Never time the call out; any thread may call this."""
        self._due_s.pop(call, None)

    def left_s(self, call: LimitedCall) -> float | None:
        """The seconds left to a call; None without a limit. Any thread may call this."""
        due_s = self._due_s.get(call)
        return None if due_s is None else max(0.0, due_s - self._loop.time())

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
