"""One piece of data: whose it is, what its readers are told, and where its bytes are."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from gpu_manager.data.data_files import DataFile, read_only
from gpu_manager.node.leases_in_force import SessionKey
from gpu_manager.runtimes.runtime import HostedModel


class DataStage(Enum):
    """Whether data may be read."""

    ARRIVING = "arriving"
    THERE = "there"
    GONE = "gone"


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
    expires_s: float
    stage: DataStage = DataStage.ARRIVING
    file: DataFile | None = None
    disk: int = -1
    hosted: HostedModel | None = None
    readers: Counter[SessionKey] = field(default_factory=Counter)
    spoilt: bool = False
    wished: bool = False

    @property
    def function(self) -> str:
        """The function that put it: only that one gets its memory again."""
        return self.owner.rpartition("/")[0]

    @property
    def is_here(self) -> bool:
        """Whether the bytes are in this host's memory or on its disk."""
        return self.file is not None or self.disk >= 0

    @property
    def is_read(self) -> bool:
        """Whether somebody may be reading the file."""
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
