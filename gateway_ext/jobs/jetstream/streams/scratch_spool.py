"""Bodies on their way to the servers; a large one is in a file without a name."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from gateway_ext.jobs.queue.body_buffer import BodyBuffer


class ScratchSpool:
    """One body while it arrives; its file has no name and disappears with the process."""

    def __init__(self, folder: Path, held_bytes: int, most_bytes: int) -> None:
        # Not a method of this object: both would keep each other, and the body, for a while.
        self._body = BodyBuffer(partial(_opened, folder), held_bytes, most_bytes)

    @property
    def size_bytes(self) -> int:
        """How much has been written."""
        return self._body.size_bytes

    async def write(self, chunk: bytes) -> None:
        """Add to the body; TooLarge beyond the limit."""
        await self._body.write(chunk)

    async def pieces(self, size_bytes: int) -> AsyncIterator[bytes]:
        """The whole body in pieces of this size, the last one shorter; repeatable."""
        body = self._body
        if body.file is None:
            for at in range(0, len(body.held), size_bytes):
                yield bytes(body.held[at : at + size_bytes])
            return
        if body.held:
            await body.in_thread(body.flush)
        at_bytes = 0
        while piece := await body.in_thread(partial(self._read, at_bytes, size_bytes)):
            yield piece
            at_bytes += len(piece)

    async def discard(self) -> None:
        """Free the body's space."""
        await self._body.close()

    def _read(self, at_bytes: int, size_bytes: int) -> bytes:
        assert self._body.file is not None
        self._body.file.seek(at_bytes)
        return self._body.file.read(size_bytes)


def _opened(folder: Path) -> BinaryIO:
    return TemporaryFile(dir=folder, buffering=0)
