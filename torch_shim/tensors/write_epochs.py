"""Write epochs: show whether the function's copy of a storage differs from a worker's copy.

Every write through a handle is counted on the storage, which views, `.data` and `detach()` share.
A mark is an attribute of the storage's Python object, which PyTorch keeps as long as the storage
itself. A storage gets its mark at the first request for the mark, or for the storage of a handle; a
marked storage reports to be on the GPU.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_shim.tensors.mixed_devices import tensors_in

_MARK = "_gpufaas_mark"
_PINNED = "_gpufaas_pinned"
_untyped_storage = torch.Tensor.untyped_storage

_version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]  # noqa: SLF001 - autograd's own counter

_numbers = itertools.count(1)

# The number of the last write in this process. While it is unchanged, nothing was written: every
# write assigns a new value, so that racing threads cannot restore an old one.
writes = 0

_MOST_HOLDERS = 4


class WriteMark:
    """The record of writes to one storage, and of who may have a copy of it."""

    __slots__ = ("__weakref__", "_holders", "absent", "epoch", "key", "made_by", "untracked")

    def __init__(self, key: int = 0) -> None:
        self.epoch = next(_numbers)
        self.key = key or self.epoch  # unique in this process
        self.untracked = False  # True if another process can write to the storage
        self.absent: Any = None  # an `AbsentBytes`, if only a worker had the bytes at some time
        self.made_by: Any = None  # the call that made a content, if it is known
        self._holders: tuple[Any, ...] = ()

    def held_by(self, peer: Any) -> None:
        """Have this worker told when the storage is gone; only the last few are, as others end."""
        if peer not in self._holders:
            self._holders = (*self._holders[1 - _MOST_HOLDERS :], peer)

    def __del__(self) -> None:
        for holder in self._holders:
            holder.drop(self.key)


def mark_of(tensor: torch.Tensor) -> WriteMark | None:
    return storage_mark(storage_of(tensor))


def marked(tensor: torch.Tensor) -> WriteMark:
    """Return the mark of a tensor's storage, created if missing; later writes change its epoch."""
    return mark_storage(storage_of(tensor))


def new_key() -> int:
    """Return a key that no storage of this process has."""
    return next(_numbers)


def mark_storage(storage: torch.UntypedStorage, key: int = 0) -> WriteMark:
    """Return the mark of a storage, created if missing; it makes the storage a GPU's."""
    mark = storage_mark(storage)
    if mark is None:
        # setdefault: two threads that do this at the same time use the same mark.
        mark = storage.__dict__.setdefault(_MARK, WriteMark(key))
    return mark


def adopt_mark(storage: torch.UntypedStorage, mark: WriteMark) -> None:
    """Give a storage the mark of the storage that it replaces."""
    storage.__dict__[_MARK] = mark


def storage_mark(storage: torch.UntypedStorage) -> WriteMark | None:
    return storage.__dict__.get(_MARK)


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's count of writes, which includes writes in C++ but not through `.data`."""
    try:
        return _version(tensor)
    except RuntimeError:  # a tensor created in inference mode has no count
        return 0


def content_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what names the present content of a tensor's storage: its epoch, autograd's count."""
    return marked(tensor).epoch, version_of(tensor)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def note_write(tensor: torch.Tensor) -> None:
    """Count a write to a tensor, after the write."""
    try:
        storage = storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and functorch's tensors have no storage
        storage = None
    note_storage_write(storage)


def note_storage_write(storage: torch.UntypedStorage | None) -> None:
    """Count a write to a storage, or to one that nobody can name, after the write."""
    global writes  # noqa: PLW0603 - one number for the whole process
    number = next(_numbers)
    mark = None if storage is None else storage_mark(storage)
    if mark is not None:
        mark.epoch = number
    writes = number


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of any tensor, without marking the storage."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - documented, though private
        return _untyped_storage(tensor)


def note_all(values: Iterable[Any]) -> None:
    for tensor in tensors_in(values):
        note_write(tensor)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Make a CPU tensor report that its memory is pinned, and return the tensor."""
    storage_of(tensor).__dict__[_PINNED] = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return _PINNED in storage_of(tensor).__dict__
