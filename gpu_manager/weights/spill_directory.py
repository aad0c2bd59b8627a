"""Images on disk, as safetensors files: the weights that do not fit into the store's memory."""

import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from cache_manager.tier_index import TierIndex
from gpu_manager.errors import StoreFailed, UnknownImage, WeightsChanged
from gpu_manager.weights.sealed_images import GrowingImage
from torch_shim.wire.image_digests import ImageTable, lay_out

_log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_PARTIAL = ".partial"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 64
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MOST_FILES = 1 << 16  # small files take more of a disk than their bytes


class Spilled(NamedTuple):
    """An image in an open file."""

    digest: str
    table: ImageTable
    source: int
    start: int

    def copy(self, image: GrowingImage, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """Copy the image piece by piece; yield each one's size, and where the image ends by now.

        Raise WeightsChanged if the file ends too early.
        """
        position = self.start
        copied = end = 0
        for offset, size in self.table.storages:
            for at in range(0, size, piece_bytes):
                count = min(piece_bytes, size - at)
                if not image.read(offset + at, count, self.source, position + at):
                    raise WeightsChanged(self.digest, "it was truncated while being read")
                copied, end = copied + count, offset + at + count
                if copied >= piece_bytes:
                    yield copied, end
                    copied = 0
            position += size
        yield copied, self.table.total_bytes


class SpillDirectory:
    """At most `budget_bytes` of images in one directory; the least recently used are deleted.

    Tenants share the budget as they share the host's memory; images that no tenant has are deleted
    first.
    Files of an earlier run are reused, and verified when they are read; partial files are removed.
    Several managers may share a directory, because a file's name is the digest of its content.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self.path = path
        self.budget_bytes = budget_bytes
        self.on_change: Callable[[str], None] = _ignore  # gets digests written or removed
        self.tenants: Callable[[str], frozenset[str]] = _unknown  # that have the image
        self._files = TierIndex("lru", budget_bytes, _MOST_FILES)
        self._lock = threading.Lock()  # protects _files; not held while writing
        self._writing = threading.Lock()
        self._is_faulty = False  # since the last write
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_partial_files()
            self._take_over()
        except OSError as error:
            raise StoreFailed(f"spill directory {path}: {error}") from error

    @property
    def used_bytes(self) -> int:
        return self._files.used_bytes

    def __contains__(self, digest: str) -> bool:
        return ModelId(digest) in self._files

    def __len__(self) -> int:
        return len(self._files)

    def write(self, digest: str, descriptor: int, table: ImageTable) -> bool:
        """Write an image durably to disk; return False if it is larger than the budget.

        If the disk is full or broken, leave no file and raise StoreFailed.
        """
        with self._writing:
            header = _header(digest, table)
            size = len(header) + sum(size for _, size in table.storages)
            if self._has(digest):
                return True
            if size > self.budget_bytes:
                return False
            try:
                with self._lock:
                    self._make_room(size)
                self._write_file(digest, header, descriptor, table)
            except OSError as error:
                self._log_fault(f"cannot spill weights {digest} to {self.path}: {error}")
                raise StoreFailed(f"spilling weights {digest}: {error}") from error
            self._is_faulty = False
            with self._lock:
                self._files.admit(ModelId(digest), size, time.monotonic())
                self.on_change(digest)
            return True

    def table(self, digest: str) -> ImageTable:
        """Return the layout of an image on disk; delete the file if it cannot be read."""
        with self._deleted_if_changed(digest), self._opened(digest) as source:
            return _read_table(digest, source)[0]

    @contextmanager
    def reading(self, digest: str) -> Iterator["Spilled"]:
        """Open an image's file for loading; delete the file if its content has changed."""
        with self._deleted_if_changed(digest), self._opened(digest) as source:
            self._has(digest)  # marks it as used: making room in memory must not delete it
            table, start = _read_table(digest, source)
            yield Spilled(digest, table, source, start)
            with suppress(OSError):  # the disk may allow reading only
                os.utime(source)  # keeps the order of use for the next process

    def delete(self, digest: str, *, is_usable: bool = True) -> None:
        """Delete an image's file, if there is one; one that the disk keeps is known if usable."""
        with self._lock:
            try:
                self._delete(digest)
            except OSError as error:
                self._log_fault(f"cannot delete weights {digest} from {self.path}: {error}")
                if not is_usable:
                    self._forget(digest)

    def _log_fault(self, text: str) -> None:
        """Log the first of several faults; the next one after the disk has worked again."""
        _log.log(logging.DEBUG if self._is_faulty else logging.ERROR, "%s", text)
        self._is_faulty = True

    def _has(self, digest: str) -> bool:
        """Return whether the file exists, and mark it as the most recently used."""
        with self._lock:
            if digest not in self:
                return False
            self._files.touch(ModelId(digest), time.monotonic())
            return True

    def _file(self, digest: str) -> Path:
        return self.path / (digest + _SUFFIX)

    def _remove_partial_files(self) -> None:
        """Remove partial files, except those that a running writer has locked."""
        for partial in self.path.glob(f"*{_PARTIAL}"):
            try:
                descriptor = os.open(partial, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                _log.warning("cannot remove %s: %s", partial, error)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink(missing_ok=True)
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)

    def _take_over(self) -> None:
        found = []
        for file in self.path.glob(f"*{_SUFFIX}"):
            if _DIGEST.fullmatch(file.stem) and file.is_file():
                status = file.stat()
                found.append((status.st_mtime_ns, file.stem, status.st_size))
        for _, digest, size in sorted(found):
            self._files.admit(ModelId(digest), size, time.monotonic())
        self._make_room(0)

    def _make_room(self, size: int) -> None:
        if self._files.short_bytes + size <= 0 and not self._files.is_short:
            return
        for digest in self._files:
            self._files.set_owners(digest, self.tenants(digest))
        demotion = self._files.room(time.monotonic(), size)
        for digest in () if demotion is None else demotion.victims:
            self._delete(digest)

    def _delete(self, digest: str) -> None:
        """Delete a file; it stays known if the disk refuses, which raises OSError."""
        self._file(digest).unlink(missing_ok=True)
        self._forget(digest)

    def _forget(self, digest: str) -> None:
        self._files.remove(ModelId(digest))
        self.on_change(digest)

    def _write_file(self, digest: str, header: bytes, source: int, table: ImageTable) -> None:
        """Write a file atomically and durably, even if the machine loses power."""
        partial = self.path / f"{digest}.{os.getpid()}{_PARTIAL}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _write_all(descriptor, header)
            for offset, size in table.storages:
                _send(descriptor, source, offset, size)
            os.fsync(descriptor)
            partial.rename(self._file(digest))
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        _sync_directory(self.path)

    @contextmanager
    def _deleted_if_changed(self, digest: str) -> Iterator[None]:
        try:
            yield
        except WeightsChanged as error:
            _log.error("%s; deleted", error)
            self.delete(digest, is_usable=False)
            raise

    @contextmanager
    def _opened(self, digest: str) -> Iterator[int]:
        try:
            descriptor = os.open(self._file(digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            self.delete(digest, is_usable=False)
            raise UnknownImage(digest) from error
        except OSError as error:
            raise StoreFailed(f"spilled weights {digest}: {error}") from error
        try:
            yield descriptor
        except OSError as error:
            raise StoreFailed(f"spilled weights {digest}: {error}") from error
        finally:
            os.close(descriptor)


def _ignore(_digest: str) -> None:
    """Do nothing: nobody wants to know."""


def _unknown(_digest: str) -> frozenset[str]:
    """No tenants: a directory by itself does not know them."""
    return frozenset()


def _header(digest: str, table: ImageTable) -> bytes:
    """Return a safetensors header: one tensor of bytes per storage, named by its number."""
    entries: dict[str, object] = {"__metadata__": {"format": "gpufaas image", "digest": digest}}
    start = 0
    for number, (_, size) in enumerate(table.storages):
        offsets = [start, start + size]
        entries[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(_LENGTH_BYTES + len(text)) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT
    text = text.ljust(padded - _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _read_table(digest: str, source: int) -> tuple[ImageTable, int]:
    """Return the table and the offset of the first storage; the digest is verified on loading."""
    length = int.from_bytes(os.pread(source, _LENGTH_BYTES, 0), "little")
    if length > min(_MOST_HEADER_BYTES, os.fstat(source).st_size):
        raise WeightsChanged(digest, f"a header of {length} bytes")
    try:
        entries = json.loads(os.pread(source, length, _LENGTH_BYTES))
        names = [str(number) for number in range(len(entries) - 1)]
        sizes = [_size(entries[name]["data_offsets"]) for name in names]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise WeightsChanged(digest, f"its header cannot be read: {error!r}") from error
    data_start = _LENGTH_BYTES + length
    if data_start + sum(sizes) != os.fstat(source).st_size:
        raise WeightsChanged(digest, "the sizes in its header do not match the file's size")
    return lay_out(sizes), data_start


def _size(offsets: list[int]) -> int:
    size = offsets[1] - offsets[0]
    if type(size) is not int or size < 0:
        raise ValueError(f"a storage of {size!r} bytes")
    return size


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _send(descriptor: int, source: int, offset: int, size: int) -> None:
    """Copy bytes between files inside the kernel."""
    end = offset + size
    while offset < end:
        offset += os.sendfile(descriptor, source, offset, end - offset)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
