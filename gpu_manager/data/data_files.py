"""Memory that data lies in, and that is used again for later data of the same function.

To clear new pages costs several times what a copy to used ones does. Memory never passes from one
function to another, and is given to a function again only when nobody reads the earlier data.
"""

import fcntl
import os
from collections import OrderedDict

from gpu_manager.errors import DataFailed

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
        """Whether the memory is used again when its data is gone."""
        return self.size_bytes >= LEAST_REUSED_BYTES

    def for_writer(self) -> int:
        """Return a descriptor for who fills the memory; the caller closes it."""
        return os.dup(self.descriptor)

    def for_reader(self) -> int:
        """Return a descriptor that allows reading only; the caller closes it."""
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
        self._files: OrderedDict[DataFile, tuple[str, float]] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._files)

    def take(self, function: str, size_bytes: int) -> DataFile | None:
        """Return a file of the function that is as large as a new one would be.

        What is behind the new data is cleared: its readers may not know the earlier data.
        """
        wanted = room_for(size_bytes)
        for file, (owner, _) in self._files.items():
            if owner == function and file.size_bytes == wanted:
                del self._files[file]
                os.pwrite(file.descriptor, bytes(wanted - size_bytes), size_bytes)
                return file
        return None

    def give(self, function: str, file: DataFile, now_s: float) -> None:
        """Keep a file for the function's next data."""
        self._files[file] = function, now_s

    def close_oldest(self) -> int:
        """Give up the file that has waited the longest; return its bytes, 0 if there is none."""
        if not self._files:
            return 0
        file, _ = self._files.popitem(last=False)
        file.close()
        return file.size_bytes

    def close_since(self, before_s: float) -> int:
        """Give up the files that have waited since then; return their bytes."""
        closed = 0
        while self._files and next(iter(self._files.values()))[1] <= before_s:
            closed += self.close_oldest()
        return closed
