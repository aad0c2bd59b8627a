"""Bodies in the queue's folder, going in and coming out: small ones in memory, large in files."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from gateway_ext.errors import BodyLost, QueueFailed, TooLarge

_WRITE_BYTES = 1 << 20
_READ_BYTES = 1 << 20


class Kept(NamedTuple):
    """A whole body: its bytes, or the name of the file that has them."""

    content: bytes | None
    file: str | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileBody:
    """A body in a file; see `Body`."""

    path: Path
    size_bytes: int

    async def check(self) -> None:
        """BodyLost where it is not there whole."""
        try:
            found = await asyncio.to_thread(self.path.stat)
        except OSError as error:
            raise BodyLost(f"its body cannot be read: {error}") from error
        if found.st_size != self.size_bytes:
            raise BodyLost(f"its body has {found.st_size} of {self.size_bytes} bytes")

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, in its order; nothing is held open in between."""
        at_bytes = 0
        while piece := await asyncio.to_thread(self._read, at_bytes):
            yield piece
            at_bytes += len(piece)

    def _read(self, at_bytes: int) -> bytes:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(at_bytes)
                return file.read(_READ_BYTES)
        except OSError as error:
            raise QueueFailed(f"its body cannot be read: {error}") from error


class FileSpool:
    """One body; up to `inline_bytes` it needs no file."""

    def __init__(self, folder: Path, inline_bytes: int, most_bytes: int) -> None:
        self._path = folder / uuid4().hex
        self._inline_bytes = inline_bytes
        self._most_bytes = most_bytes
        self._size_bytes = 0
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        self._kept = False
        self._writing: asyncio.Future[None] | None = None

    @property
    def size_bytes(self) -> int:
        """How much has been written."""
        return self._size_bytes

    async def write(self, chunk: bytes) -> None:
        """Add to it; TooLarge beyond the limit."""
        self._size_bytes += len(chunk)
        if self._size_bytes > self._most_bytes:
            raise TooLarge(self._most_bytes)
        self._buffer += chunk
        if self._size_bytes > self._inline_bytes and len(self._buffer) >= _WRITE_BYTES:
            await self._in_thread(self._flush)

    async def keep(self) -> Kept:
        """The whole body, which is on the disk where it has a file; `discard` does nothing more.

        It may be asked for again, also after QueueFailed.
        """
        if not self._kept and self._size_bytes > self._inline_bytes:
            await self._in_thread(self._sync)
        self._kept = True
        if self._file is None:
            return Kept(bytes(self._buffer), None, self._size_bytes)
        return Kept(None, self._path.name, self._size_bytes)

    async def discard(self) -> None:
        """It is not needed, unless it was kept."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._kept or self._file is None:
            return
        file, self._file = self._file, None
        with suppress(OSError):  # what is left of it goes at the next start
            file.close()
            self._path.unlink(missing_ok=True)

    async def _in_thread(self, write: Callable[[], None]) -> None:
        # Shielded: a thread cannot be stopped, and the file must not be closed under it.
        self._writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            await asyncio.shield(self._writing)
        except OSError as error:
            raise QueueFailed(f"the job queue cannot keep a body: {error}") from error

    def _flush(self) -> None:
        if self._file is None:
            self._file = self._path.open("xb", buffering=0)
        # What is written is no longer here: after an error it goes on where it stopped.
        while self._buffer:
            written = self._file.write(self._buffer[:_WRITE_BYTES]) or 0
            del self._buffer[:written]

    def _sync(self) -> None:
        self._flush()
        assert self._file is not None
        # It is closed already where only the folder failed before.
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()
        sync_folder(self._path.parent)


def sync_folder(folder: Path) -> None:
    """The names in it survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
