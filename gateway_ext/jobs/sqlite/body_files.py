"""Bodies of SQLite's queue, written and read: small ones in a row, large ones in files."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from gateway_ext.errors import BodyLost, QueueFailed
from gateway_ext.jobs.body_buffer import BodyBuffer

_READ_BYTES = 1 << 20


class KeptBody(NamedTuple):
    """A complete body: its bytes, or the name of the file that has them."""

    content: bytes | None
    file: str | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileBody:
    """A body in a file; see `StoredBody`."""

    path: Path
    size_bytes: int

    async def check(self) -> None:
        """Raise BodyLost where the file is missing or has another size."""
        try:
            status = await asyncio.to_thread(self.path.stat)
        except OSError as error:
            raise BodyLost(f"its body cannot be read: {error}") from error
        if status.st_size != self.size_bytes:
            raise BodyLost(f"its body has {status.st_size} of {self.size_bytes} bytes")

    async def pieces(self) -> AsyncIterator[bytes]:
        """No file stays open between two pieces."""
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


class FileSpool(BodyBuffer):
    """One body while it arrives; up to `inline_bytes` it needs no file."""

    def __init__(self, folder: Path, inline_bytes: int, most_bytes: int) -> None:
        self._path = folder / uuid4().hex
        super().__init__(partial(_opened, self._path), inline_bytes, most_bytes)
        self._kept = False

    async def keep(self) -> KeptBody:
        """The complete body, synced to the disk where it has a file; `discard` then does nothing.

        It may be called again, also after QueueFailed.
        """
        if not self._kept and not self.fits_memory:
            await self.in_thread(self._sync)
        self._kept = True
        if self.file is None:
            return KeptBody(bytes(self.held), None, self.size_bytes)
        return KeptBody(None, self._path.name, self.size_bytes)

    async def discard(self) -> None:
        await self.idle()
        if not self._kept and await self.close():
            with suppress(OSError):  # the next start removes what remains
                self._path.unlink(missing_ok=True)

    def _sync(self) -> None:
        # The file is closed already where only the sync of its folder failed before.
        if self.file is None or not self.file.closed:
            file = self.flush()
            os.fsync(file.fileno())
            file.close()
        sync_folder(self._path.parent)


def _opened(path: Path) -> BinaryIO:
    return path.open("xb", buffering=0)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
