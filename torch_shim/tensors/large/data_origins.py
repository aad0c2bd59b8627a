"""Storages that came from another function's data: workers take the same data without a copy.

An origin holds as long as nobody has written to the storage here.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from torch_shim.tensors import write_epochs
from torch_shim.wire.arena import LentPages
from torch_shim.wire.worker_peer import Content, WorkerPeer

_ORIGIN = "_gpufaas_data"

# How many origins were noted: while none was, calls need not look for one.
noted = 0


@dataclass(slots=True)
class DataOrigin:
    """Where a storage's bytes lie: with a worker's `process`, in a file from `start` on, or both.

    `content` is the storage's epoch and version when it had these bytes; `taken` are the workers
    that use the data, each by its key there.
    """

    handle: str
    size_bytes: int
    process: str = ""
    start: int = 0
    file: LentPages | None = None
    content: Content = (0, 0)
    taken: list[tuple[WorkerPeer, int]] = field(default_factory=list)

    def located(self) -> tuple[int, int] | None:
        """Return the file's descriptor and where the bytes begin; None without a file."""
        file = self.file
        return None if file is None or file.descriptor < 0 else (file.descriptor, self.start)


def note_origin(tensor: torch.Tensor, origin: DataOrigin) -> None:
    """Record where the bytes of a tensor's storage came from; it has just been made."""
    global noted  # noqa: PLW0603 - one number for the whole process
    mark = write_epochs.marked(tensor)
    origin.content = mark.epoch, write_epochs.version_of(tensor)
    write_epochs.storage_of(tensor).__dict__[_ORIGIN] = origin
    noted += 1


def origin_of(storage: torch.UntypedStorage, content: Content) -> DataOrigin | None:
    """Return where a storage's present content came from, if it came from data."""
    found: Any = storage.__dict__.get(_ORIGIN)
    return found if isinstance(found, DataOrigin) and found.content == content else None
