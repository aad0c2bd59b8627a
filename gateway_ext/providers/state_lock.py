"""One gateway at a time has a state folder."""

import fcntl
from pathlib import Path
from typing import TextIO

from gateway_ext.errors import ProviderFailed


class StateLock:
    """Taken at the start, given back at the end, and by the system if the gateway dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: TextIO | None = None

    def take(self) -> None:
        """ProviderFailed where another gateway is at it."""
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
        """Another gateway may have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
