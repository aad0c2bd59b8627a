"""Images in sealed shared memory: writes images, and checks those that clients send."""

import fcntl
import mmap
import os
from collections.abc import Callable

from gpu_manager.errors import BadImage, StoreFailed
from torch_shim.wire.image_digests import (
    ImageTable,
    image_digest,
    parts_of,
    unpack_sizes,
)
from torch_shim.wire.protocol import aligned

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1: only mappings that exist already can write
MEMORY_NAME = "gpufaas-image"  # the name in /proc, by which tests count images

Buffer = bytes | bytearray | memoryview


def read_sizes(packed: bytes, total_bytes: int) -> ImageTable:
    """Return the table for a frame's sizes of storages; raise BadImage if they are invalid."""
    try:
        table = unpack_sizes(packed)
    except ValueError as error:
        raise BadImage(str(error)) from error
    if table.total_bytes != total_bytes:
        raise BadImage(f"the sizes add up to {table.total_bytes}, not to {total_bytes}")
    return table


def check(descriptor: int, table: ImageTable) -> None:
    """Raise BadImage unless this is readable, sealed shared memory that fits the table.

    No process, including the sender, can change the content or size of memory that passes.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        raise BadImage(f"not shared memory: {error}") from error
    if seals & SEALS != SEALS:
        raise BadImage(f"shared memory without all seals: {seals:#x}, not {SEALS:#x}")
    if mode == os.O_WRONLY:
        raise BadImage("shared memory that cannot be read")
    size = os.fstat(descriptor).st_size
    if size != table.total_bytes:
        raise BadImage(f"shared memory of {size} bytes, the table says {table.total_bytes}")
    _check_gaps(descriptor, table)


def checked_digest(descriptor: int, table: ImageTable, announced: str | None) -> str:
    """Return the digest of memory that `check` passes; BadImage if another one was announced."""
    check(descriptor, table)
    digest = image_digest(parts_of(descriptor, table))
    if announced not in (None, digest):
        raise BadImage(f"announced as {announced}, its digest is {digest}")
    return digest


class ImageWriter:
    """Writes shared memory sequentially, and then seals it."""

    def __init__(self, table: ImageTable) -> None:
        self.table = table
        self.written_bytes = 0
        try:
            self._descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise StoreFailed(f"shared memory: {error}") from error

    def write(self, data: Buffer) -> None:
        """Append these bytes; raise BadImage if they exceed the table's total."""
        if self.written_bytes + len(data) > self.table.total_bytes:
            raise BadImage(f"more than the announced {self.table.total_bytes} bytes")
        rest = memoryview(data)
        try:
            while rest:
                count = os.write(self._descriptor, rest)
                self.written_bytes += count
                rest = rest[count:]
        except OSError as error:
            raise StoreFailed(f"shared memory: {error}") from error

    def seal(self) -> int:
        """Seal the memory and return its descriptor, which the caller must close."""
        try:
            os.ftruncate(self._descriptor, self.table.total_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            raise StoreFailed(f"shared memory: {error}") from error
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def close(self) -> None:
        """Free the memory, unless `seal` has returned its descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class GrowingImage:
    """Shared memory of an image that is being read: others may map it, only this object writes."""

    def __init__(self, table: ImageTable) -> None:
        self.table = table
        self.descriptor = -1
        self._memory: mmap.mmap | None = None
        try:
            self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, table.total_bytes)
            if table.total_bytes:
                self._memory = mmap.mmap(self.descriptor, table.total_bytes)
            seals = _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            self.close()
            raise StoreFailed(f"shared memory: {error}") from error

    def view(self) -> memoryview:
        """The image's bytes; to be released before the image is sealed or closed."""
        return memoryview(b"" if self._memory is None else self._memory)

    def read(self, offset: int, size_bytes: int, source: int, source_offset: int) -> bool:
        """Fill a place with bytes of an open file; return False if the file ends too early."""
        assert self._memory is not None, "an empty or sealed image has no place for bytes"
        with memoryview(self._memory) as whole:
            while size_bytes:
                with whole[offset : offset + size_bytes] as place:
                    count = os.preadv(source, [place], source_offset)
                if not count:
                    return False
                offset, source_offset = offset + count, source_offset + count
                size_bytes -= count
        return True

    def seal(self) -> int:
        """Seal the memory and return its descriptor, which the caller must close."""
        self._unmap()
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            raise StoreFailed(f"shared memory: {error}") from error
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """Free the memory, unless `seal` has returned its descriptor."""
        self._unmap()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _unmap(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _check_gaps(descriptor: int, table: ImageTable) -> None:
    """Raise BadImage unless the gaps are zero: gaps are not hashed."""
    for offset, size in table.storages:
        start, end = offset + size, offset + aligned(size)
        if start < end and any(os.pread(descriptor, end - start, start)):
            raise BadImage(f"bytes other than zero between storages, at {start}")


class WeightsUpload:
    """The upload of one image into the weight store; its room is reserved until the end."""

    def __init__(
        self, writer: ImageWriter, keep: Callable[[int], str], ended: Callable[[], None]
    ) -> None:
        """`keep` takes ownership of the sealed memory and returns its digest.

        `ended` is called once, at the end of the upload.
        """
        self.table = writer.table
        self._writer: ImageWriter | None = writer
        self._keep = keep
        self._ended = ended

    def write(self, offset: int, data: Buffer) -> None:
        """Append bytes for `offset`, which must be the end of the previous bytes."""
        writer = self._open_writer()
        if offset != writer.written_bytes:
            raise BadImage(f"bytes for offset {offset}, expected {writer.written_bytes}")
        writer.write(data)

    def finish(self) -> str:
        """Hash and store the image, return its digest; raise BadImage if it is incomplete."""
        writer = self._open_writer()
        try:
            if writer.written_bytes != self.table.total_bytes:
                written, total = writer.written_bytes, self.table.total_bytes
                raise BadImage(f"{written} of {total} bytes were received")
            descriptor = writer.seal()
        finally:
            self.close()
        return self._keep(descriptor)

    def close(self) -> None:
        """Discard the bytes received; do nothing after `finish`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._ended()

    def _open_writer(self) -> ImageWriter:
        if self._writer is None:
            raise BadImage("this upload has ended")
        return self._writer
