"""A lock that lets one gateway at a time use a state folder."""

import fcntl
from pathlib import Path
from typing import TextIO

from gateway_ext.errors import ProviderFailed


class StateLock:
    """A file lock, which the system releases if the gateway dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: TextIO | None = None

    def take(self) -> None:
        """ProviderFailed if another gateway has it."""
        lock = (self._folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ProviderFailed(f"another gateway has its state in {self._folder}") from error
        self._lock = lock

    @property
    def ours(self) -> bool:
        """Whether this gateway has it."""
        return self._lock is not None

    def give_back(self) -> None:
        """Release the lock, if this gateway has it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
