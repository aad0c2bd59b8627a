"""Bodies on their way to the servers: small ones in memory, large ones in a file without a name."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeVar

from gateway_ext.errors import QueueFailed, TooLarge

_WRITE_BYTES = 256 << 10

_Value = TypeVar("_Value")


class ScratchSpool:
    """One body, as it comes; a file that nobody can name is gone with the process."""

    def __init__(self, folder: Path, held_bytes: int, most_bytes: int) -> None:
        self._folder = folder
        self._held_bytes = held_bytes
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        self._working: asyncio.Future[Any] | None = None
        self.size_bytes = 0

    async def write(self, chunk: bytes) -> None:
        """Add to it; TooLarge beyond the limit."""
        self.size_bytes += len(chunk)
        if self.size_bytes > self._most_bytes:
            raise TooLarge(self._most_bytes)
        self._buffer += chunk
        if self.size_bytes > self._held_bytes and len(self._buffer) >= _WRITE_BYTES:
            await self._flush()

    async def pieces(self, size_bytes: int) -> AsyncIterator[bytes]:
        """All of it in pieces of this size, but the last; as often as one likes."""
        if self._file is None:
            for at in range(0, len(self._buffer), size_bytes):
                yield bytes(self._buffer[at : at + size_bytes])
            return
        if self._buffer:
            await self._flush()
        at_bytes = 0
        while piece := await self._in_thread(partial(self._read, at_bytes, size_bytes)):
            yield piece
            at_bytes += len(piece)

    async def discard(self) -> None:
        """It is not needed any more."""
        if self._working is not None:
            await asyncio.wait([self._working])
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    async def _flush(self) -> None:
        await self._in_thread(self._append)

    async def _in_thread(self, work: Callable[[], _Value]) -> _Value:
        # Shielded: a thread cannot be stopped, and the file must not be closed under it.
        working = self._working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except OSError as error:
            raise QueueFailed(f"the job queue cannot take a body in: {error}") from error

    def _append(self) -> None:
        if self._file is None:
            self._file = TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - see `discard`
        self._file.seek(0, 2)
        # What is written is no longer here: after an error it goes on where it stopped.
        while self._buffer:
            written = self._file.write(self._buffer[:_WRITE_BYTES]) or 0
            del self._buffer[:written]

    def _read(self, at_bytes: int, size_bytes: int) -> bytes:
        assert self._file is not None
        self._file.seek(at_bytes)
        return self._file.read(size_bytes)
