"""A signal that wakes every task that waits for a change."""

import asyncio


class Change:
    """Wakes all tasks that wait for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def happened(self) -> None:
        """Wake them."""
        self._event.set()
        self._event = asyncio.Event()

    async def within(self, seconds: float) -> bool:
        """Wait for the next change; False when none comes in this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
