"""A signal that wakes every task waiting for a change."""

import asyncio


class ChangeSignal:
    """Wakes all tasks that wait for the next change."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None  # while somebody waits

    @property
    def next(self) -> asyncio.Future[None]:
        """Done at the next change."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def notify(self) -> None:
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait(self, seconds: float) -> bool:
        """Wait for the next change; return False if there is none in this time."""
        return bool((await asyncio.wait({self.next}, timeout=seconds))[0])
