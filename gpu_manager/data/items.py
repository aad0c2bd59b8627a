"""One piece of data: whose it is, what its readers are told, and the file that has its bytes."""

import asyncio
import fcntl
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from gpu_manager.errors import DataFailed
from gpu_manager.node.leases import SessionKey
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.worker.orders import WithdrawData


class DataStage(Enum):
    """Whether data may be read."""

    ARRIVING = "arriving"
    THERE = "there"
    GONE = "gone"


# Memory that data lies in, and that is used again for later data of the same function.
#
# To clear new pages costs several times what a copy to used ones does. Memory never passes from
# one function to another, and is given to a function again only when nobody reads the earlier
# data.

MEMORY_NAME = "gpufaas-data"  # the name in /proc, by which tests count
# Smaller memory is sealed against writes when it is filled, and is not used again.
LEAST_REUSED_BYTES = 1 << 20
_PAGE_BYTES = 4096
_ROUNDED_TO = 1 << 21
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def room_for(size_bytes: int) -> int:
    """Return the size of the memory for so many bytes."""
    unit = _ROUNDED_TO if size_bytes >= LEAST_REUSED_BYTES else _PAGE_BYTES
    return max(unit, -(-size_bytes // unit) * unit)


class DataFile:
    """Memory of a fixed size. Functions get descriptors of it: one to write, others to read."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor = -1
        try:
            self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(self.descriptor, 0o600)  # a reader's descriptor cannot be opened for writing
            os.ftruncate(self.descriptor, size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError as error:
            self.close()
            raise DataFailed(f"memory for data: {error}") from error

    @property
    def is_reused(self) -> bool:
        return self.size_bytes >= LEAST_REUSED_BYTES

    def for_writer(self) -> int:
        """Return a descriptor for who fills the memory; the caller closes it."""
        return os.dup(self.descriptor)

    def for_reader(self) -> int:
        return read_only(self.descriptor)

    def fill(self) -> None:
        """The content is there; seal what is not used again. DataFailed if it is still mapped."""
        if self.is_reused:
            return
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise DataFailed(f"data whose writer has not let it go: {error}") from error

    def close(self) -> None:
        """Let the memory go; who maps it still keeps the pages."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def read_only(descriptor: int) -> int:
    """Return another descriptor of an open file, which allows reading only."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class FreeFiles:
    """Memory whose data is gone, by function, until it is used again or has waited too long."""

    def __init__(self) -> None:
        # The oldest first, each with what ends its wait.
        self._files: dict[DataFile, tuple[str, asyncio.TimerHandle]] = {}

    def take(self, function: str, size_bytes: int) -> DataFile | None:
        """Return a file of the function that is as large as a new one would be.

        What is behind the new data is cleared: its readers may not know the earlier data.
        """
        wanted = room_for(size_bytes)
        for file, (owner, timer) in self._files.items():
            if owner == function and file.size_bytes == wanted:
                timer.cancel()
                del self._files[file]
                os.pwrite(file.descriptor, bytes(wanted - size_bytes), size_bytes)
                return file
        return None

    def give(self, function: str, file: DataFile, timer: asyncio.TimerHandle) -> None:
        self._files[file] = function, timer

    def close_oldest(self) -> int:
        """Give up the file that has waited the longest; return its bytes, 0 if there is none."""
        oldest = next(iter(self._files), None)
        return 0 if oldest is None else self.close(oldest)

    def close(self, file: DataFile) -> int:
        """Give up this file; return its bytes."""
        _, timer = self._files.pop(file)
        timer.cancel()
        file.close()
        return file.size_bytes


@dataclass(slots=True, eq=False)
class DataItem:
    """Data from its first byte to the end of its memory.

    `about` describes it to its readers, who alone understand it; `parts` are handles of data that
    belongs to it. The bytes are in a `file` in memory, in an open file on `disk`, or only with the
    worker of `hosted`, which may have them beside a file, too. `readers` counts for each session
    how often it was let read the file. A file is `spoilt` for later data if somebody may read it
    of whom nothing more is heard. `wished` by a caller, it gives way to what functions keep.
    """

    handle: str
    tenant: str
    owner: SessionKey
    size_bytes: int
    about: bytes
    parts: tuple[str, ...]
    stage: DataStage = DataStage.ARRIVING
    file: DataFile | None = None
    disk: int = -1
    hosted: HostedModel | None = None
    readers: Counter[SessionKey] = field(default_factory=Counter)
    spoilt: bool = False
    wished: bool = False
    expiry: asyncio.TimerHandle | None = None  # at its end by time

    @property
    def function(self) -> str:
        """The function that put it: only that one gets its memory again."""
        return self.owner.rpartition("/")[0]

    @property
    def is_here(self) -> bool:
        return self.file is not None or self.disk >= 0

    @property
    def is_read(self) -> bool:
        return bool(self.readers)

    def for_reader(self, session: SessionKey) -> int:
        """Return a descriptor for a reader, who is counted until the file is given back."""
        descriptor = self.file.for_reader() if self.file is not None else read_only(self.disk)
        self.readers[session] += 1
        return descriptor

    def given_back(self, session: SessionKey) -> None:
        """A reader has given the file back; more than it was given counts for nothing."""
        if self.readers[session] > 1:
            self.readers[session] -= 1
        else:
            del self.readers[session]

    def reader_gone(self, session: SessionKey) -> None:
        """A session has ended. What it read may be mapped still, by a fork of its process."""
        if self.readers.pop(session, 0):
            self.spoilt = True


def withdraw(hosted: HostedModel, handle: str) -> None:
    """Let no further call use data that functions put with this model's worker."""
    hosted.send(WithdrawData(hosted.number, handle))


# Data on disk: files without a name, which only this process and who it lets read can open.
#
# They end with the process, as the handles of their data do: nothing is left behind or taken over.


class DataSpill:
    """A folder's disk, of which data may take so many bytes."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        try:
            for each in (folder.parent, folder):  # nobody else may list what lies in either
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataFailed(f"the folder of spilled data, {folder}: {error}") from error

    def write(self, source: int, size_bytes: int) -> int:
        """Copy the first bytes of memory to a file; return its descriptor (accesses the disk)."""
        try:
            target = self._unnamed_file()
            try:
                offset = 0
                while offset < size_bytes:
                    sent = os.sendfile(target, source, offset, size_bytes - offset)
                    if not sent:
                        raise DataFailed(f"data of {size_bytes} bytes ended after {offset}")
                    offset += sent
            except BaseException:
                os.close(target)
                raise
        except OSError as error:
            raise DataFailed(f"spilling data to {self.folder}: {error}") from error
        return target

    def _unnamed_file(self) -> int:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with tempfile.TemporaryFile(buffering=0, dir=f"/proc/self/fd/{folder}") as file:
                return os.dup(file.fileno())
        finally:
            os.close(folder)
