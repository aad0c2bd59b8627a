"""Calls that wait to be given to the handler together: those that came with one lease."""

import asyncio
import base64
import functools
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from gateway_ext.runtime.handler_calls import HandlerCall
from gateway_ext.runtime.runtime_settings import BatchSettings

_LEASE = "x-gpu-lease"
# Calls that wait, and some that came with the same leases before.
_MOST_TOKENS = 256

# Starts a batch of these calls; calls back in the loop once the next one may begin.
Start = Callable[[Sequence[HandlerCall], Callable[[], None]], None]


class _Group:
    """The calls of one lease: when each came, and whether a batch of them is under way."""

    __slots__ = ("look", "runs", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[HandlerCall, float] = {}
        self.runs = False
        self.look: asyncio.Handle | None = None


class GatheredCalls:
    """Gathers calls for batches; all of it runs in the loop.

    One batch of a lease is under way at a time, while the next one gathers. A lease is for one GPU,
    so batches of two leases are for two. Calls without a lease are one group. Those that share a
    lease may each have a token of their own, which names it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, settings: BatchSettings, start: Start
    ) -> None:
        self._loop = loop
        self._most = settings.most
        self._wait_s = settings.wait_s
        self._start = start
        self._groups: dict[str, _Group] = {}

    def add(self, call: HandlerCall) -> None:
        """Let the call wait for its batch."""
        lease = _lease_of(call)
        group = self._groups.setdefault(lease, _Group())
        group.waiting[call] = self._loop.time()
        call.holder = self
        if group.runs:
            return
        if group.look is None or len(group.waiting) >= self._most:
            self._look_at(lease, group, 0.0)

    def left(self, call: HandlerCall) -> None:
        """The call waits no more: its client has left, or its time is up."""
        group = self._groups.get(_lease_of(call))
        if group is not None:
            group.waiting.pop(call, None)

    def hurry(self) -> None:
        """Let no call wait for further ones: the process is to end."""
        self._wait_s = 0.0
        for lease, group in self._groups.items():
            if not group.runs:
                self._look_at(lease, group, 0.0)

    def _look_at(self, lease: str, group: _Group, after_s: float) -> None:
        """Look in the loop's next round, so that what has arrived by then comes along, or later."""
        if group.look is not None:
            group.look.cancel()
        if after_s > 0:
            group.look = self._loop.call_later(after_s, self._look, lease, group)
        else:
            group.look = self._loop.call_soon(self._look, lease, group)

    def _look(self, lease: str, group: _Group) -> None:
        group.look = None
        if not group.waiting:
            del self._groups[lease]
            return
        most, came_s = self._most, next(iter(group.waiting.values()))
        left_s = came_s + self._wait_s - self._loop.time()
        if len(group.waiting) < most and left_s > 0:
            self._look_at(lease, group, left_s)
            return
        members = list(islice(group.waiting, most))
        for call in members:
            del group.waiting[call]
        group.runs = True
        self._start(members, partial(self._next, lease, group))

    def _next(self, lease: str, group: _Group) -> None:
        group.runs = False
        self._look(lease, group)


def _lease_of(call: HandlerCall) -> str:
    """The call's lease, by its number and node; what is no token stands for itself."""
    token = call.event.headers.get(_LEASE, "")
    return _named_by(token) if token else ""


@functools.lru_cache(maxsize=_MOST_TOKENS)
def _named_by(token: str) -> str:
    try:
        claims = json.loads(base64.urlsafe_b64decode(token.rpartition(".")[0] + "=="))
        return f"{claims['node']} {claims['lease']} {claims['function']}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return token
