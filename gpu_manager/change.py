"""Something that changes now and then, and those who wait for it."""

import asyncio


class Change:
    """Wakes all who wait for something to change."""

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
