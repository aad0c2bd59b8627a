"""A body on its way into a queue: in memory while it is small, then in a file."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

from gateway_ext.errors import QueueDiskFull, QueueFailed, TooLarge, is_full_disk

_WRITE_BYTES = 1 << 20

_Value = TypeVar("_Value")


class BodyBuffer:
    """Collects one body; beyond `held_bytes` it continues in the file that `open_file` opens.

    Work on the file runs in a thread and is always completed, also where the caller is cancelled.
    `open_file` is no method of this object: both would keep each other, and the body, for a while.
    """

    def __init__(self, open_file: Callable[[], BinaryIO], held_bytes: int, most_bytes: int) -> None:
        self._open_file = open_file
        self._held_bytes = held_bytes
        self._most_bytes = most_bytes
        self._working: asyncio.Future[Any] | None = None
        self.size_bytes = 0
        self.held = bytearray()  # what is not in the file yet
        self.file: BinaryIO | None = None

    @property
    def fits_memory(self) -> bool:
        return self.size_bytes <= self._held_bytes

    async def write(self, chunk: bytes) -> None:
        """Raise TooLarge beyond `most_bytes`."""
        self.size_bytes += len(chunk)
        if self.size_bytes > self._most_bytes:
            raise TooLarge(self._most_bytes)
        self.held += chunk
        if not self.fits_memory and len(self.held) >= _WRITE_BYTES:
            await self.in_thread(self.flush)

    async def in_thread(self, work: Callable[[], _Value]) -> _Value:
        """Raise QueueFailed where the disk refuses the work."""
        # Shielded: a thread cannot be stopped, and the file must not be closed under it.
        working = self._working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except OSError as error:
            if is_full_disk(error):
                raise QueueDiskFull(error) from error
            raise QueueFailed(f"the job queue cannot store a body: {error}") from error

    def flush(self) -> BinaryIO:
        """Append everything in memory to the file; blocks, so that `in_thread` calls it."""
        file = self.file = self.file or self._open_file()
        file.seek(0, 2)
        # Bytes that are written leave memory, so a retry after an error continues where it stopped.
        while self.held:
            written = file.write(self.held[:_WRITE_BYTES]) or 0
            del self.held[:written]
        return file

    async def idle(self) -> None:
        """Wait until no thread works on the file."""
        if self._working is not None:
            await asyncio.wait([self._working])

    async def discard(self) -> None:
        """Forget the body, unless it belongs to a job."""
        await self.close()

    async def close(self) -> bool:
        """Close the file once no thread works on it; return whether there was a file."""
        await self.idle()
        file, self.file = self.file, None
        if file is None:
            return False
        with suppress(OSError):  # the space of a file that cannot be closed is freed at exit
            file.close()
        return True
