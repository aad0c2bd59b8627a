"""Shares the threads that hash weights among tenants, and paces a tenant's new images."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How many images one tenant may have hashed at once, and how fast it may add images.

    After `burst` new images at any speed, a tenant adds `images_per_s`; faster uploads wait.
    """

    at_once: int = 2
    burst: int = 4096
    images_per_s: float = 50.0


class _Turns:
    """The turns of one tenant, with the number of requests that have or await one."""

    __slots__ = ("free", "users")

    def __init__(self, at_once: int) -> None:
        self.free = asyncio.Semaphore(at_once)
        self.users = 0


class TenantTurns:
    """The turns of every tenant."""

    def __init__(
        self, limits: TurnLimits = TurnLimits(), now_s: Callable[[], float] | None = None
    ) -> None:
        """`now_s` is the clock; by default that of the running event loop."""
        self.limits = limits
        self._now_s = now_s or asyncio.get_running_loop().time
        self._turns: dict[str, _Turns] = {}
        # When the tenant's last image would have been added at the steady rate; those that added
        # none for the longest time are first, and a time that has passed says nothing.
        self._paced_s: dict[str, float] = {}

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for one of the tenant's turns, and hold it until the end of the block."""
        turns = self._turns.setdefault(tenant, _Turns(self.limits.at_once))
        turns.users += 1
        try:
            async with turns.free:
                yield
        finally:
            turns.users -= 1
            if not turns.users:
                del self._turns[tenant]

    async def pace(self, tenant: str) -> None:
        """Count one new image of the tenant, and wait if it adds images too fast."""
        every_s, now_s = 1.0 / self.limits.images_per_s, self._now_s()
        paced_s = max(self._paced_s.pop(tenant, 0.0), now_s) + every_s
        self._forget_paced(now_s)
        self._paced_s[tenant] = paced_s
        early_s = paced_s - self.limits.burst * every_s - now_s
        if early_s > 0.0:
            await asyncio.sleep(early_s)

    def _forget_paced(self, now_s: float) -> None:
        while self._paced_s and self._paced_s[oldest := next(iter(self._paced_s))] <= now_s:
            del self._paced_s[oldest]
