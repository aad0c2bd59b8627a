"""A signal that wakes every task waiting for a change."""

import asyncio

from common.time_limits import time_limit


class ChangeSignal:
    """Wakes all tasks that wait for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Wait for the next change; return False if there is none in this time."""
        try:
            async with time_limit(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
