"""Shows the leader that this process lives: its leases end when its connection does."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress

import aiohttp

from scheduler.model.values import LeaseId

log = logging.getLogger(__name__)

CALLER = "X-Gpufaas-Caller"
_MOST_HELD = 4_096  # that a scheduler accepts
_CONNECT_S = 2.0
# The first lease waits this long for the connection.
_FIRST_S = 1.0
# The leader sends a line a second.
_SILENCE_S = 3.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_OK = 200


class Presence:
    """Keeps a connection to the leader open since the first lease; reconnects where it breaks.

    `at` is the URL of the scheduler that led last. A scheduler that does not know the route gives
    leases that do not end with this process.
    """

    def __init__(self, at: Callable[[], str]) -> None:
        self.caller = secrets.token_hex(16)
        self._at = at
        self._held: dict[LeaseId, None] = {}
        self._staying: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()

    async def begin(self, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        """Connect before the first lease; without an answer, connecting goes on beside it."""
        if self._staying is None:
            self._staying = asyncio.create_task(self._stay(session, headers), name="presence")
        if not self._tried.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    await self._tried.wait()

    def acquired(self, lease: LeaseId) -> None:
        """Note a lease."""
        self._held[lease] = None
        if len(self._held) > _MOST_HELD:
            del self._held[next(iter(self._held))]

    def released(self, lease: LeaseId) -> None:
        """Forget a lease."""
        self._held.pop(lease, None)

    async def close(self) -> None:
        """Disconnect."""
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.wait({self._staying})

    async def _stay(self, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        pause_s = _PAUSE_S
        while True:
            at = self._at()
            try:
                connected = await self._connect(session, headers, at)
            except (aiohttp.ClientError, OSError) as error:
                connected = False
                log.debug("no presence at %s: %r", at, error)
            self._tried.set()
            pause_s = _PAUSE_S if connected else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _connect(
        self, session: aiohttp.ClientSession, headers: Mapping[str, str], at: str
    ) -> bool:
        """Stay connected until the connection ends; False if the scheduler refused."""
        fields = {"caller": self.caller, "leases": list(self._held)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        async with session.post(
            f"{at}/presence", headers=headers, json=fields, timeout=timeout
        ) as answer:
            if answer.status != _OK:
                return False
            self._tried.set()
            async for _ in answer.content.iter_any():
                pass
        return True
