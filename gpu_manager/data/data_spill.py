"""Data on disk: files without a name, which only this process and who it lets read can open.

They end with the process, as the handles of their data do: nothing is left behind or taken over.
"""

import contextlib
import errno
import os
import secrets
from pathlib import Path

from gpu_manager.errors import DataFailed

_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}


class DataSpill:
    """A folder's disk, of which data may take so many bytes."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataFailed(f"the folder of spilled data, {folder}: {error}") from error

    def write(self, source: int, size_bytes: int) -> int:
        """Copy the first bytes of memory to a file; return its descriptor (accesses the disk)."""
        try:
            target = self._unnamed_file()
        except OSError as error:
            raise DataFailed(f"spilling data to {self.folder}: {error}") from error
        try:
            offset = 0
            while offset < size_bytes:
                sent = os.sendfile(target, source, offset, size_bytes - offset)
                if not sent:
                    raise DataFailed(f"data of {size_bytes} bytes ended after {offset}")
                offset += sent
        except OSError as error:
            os.close(target)
            raise DataFailed(f"spilling data to {self.folder}: {error}") from error
        except BaseException:
            os.close(target)
            raise
        return target

    def _unnamed_file(self) -> int:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with contextlib.suppress(IsADirectoryError):
                return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
        finally:
            os.close(folder)
        return self._unlinked_file()

    def _unlinked_file(self) -> int:
        """The same on a file system that has no unnamed files."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            name = f"{secrets.token_hex(16)}.data"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600, dir_fd=folder)
            os.unlink(name, dir_fd=folder)
            return target
        finally:
            os.close(folder)
