"""Write epochs: what tells a worker's copy of a storage that the function's copy has changed.

Every write through a handle is counted on the storage, which views, `.data` and `detach()` share.
A mark lives as an attribute of the storage's Python object, which PyTorch keeps for as long as
the storage itself. A storage is marked when somebody asks for its mark, or takes the storage of a
handle: a marked storage answers that it is on the GPU.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MARK = "_gpufaas_mark"
_PINNED = "_gpufaas_pinned"
_untyped_storage = torch.Tensor.untyped_storage

_version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]  # noqa: SLF001 - the counter autograd goes by

_numbers = itertools.count(1)

# The number of the last write noted anywhere in this process. Unchanged, it proves that nothing
# was written; every write assigns another value, so that racing threads cannot restore one.
writes = 0


class WriteMark:
    """What is known about writes to one storage."""

    __slots__ = ("epoch", "key", "untracked")

    def __init__(self, key: int = 0) -> None:
        self.epoch = next(_numbers)
        self.key = key or self.epoch  # no other storage of this process ever has it
        self.untracked = False  # somebody can write without our seeing it


def mark_of(tensor: torch.Tensor) -> WriteMark | None:
    """The mark of a tensor's storage, if it has one."""
    return storage_mark(storage_of(tensor))


def marked(tensor: torch.Tensor) -> WriteMark:
    """The mark of a tensor's storage, made if need be; from then on writes change its epoch."""
    return mark_storage(storage_of(tensor))


def new_key() -> int:
    """A key that no storage of this process has or will have."""
    return next(_numbers)


def mark_storage(storage: torch.UntypedStorage, key: int = 0) -> WriteMark:
    """The mark of a storage, made if need be: the storage is a GPU's from then on."""
    mark = storage_mark(storage)
    if mark is None:
        # One winner where two threads ask at once.
        mark = storage.__dict__.setdefault(_MARK, WriteMark(key))
    return mark


def adopt_mark(storage: torch.UntypedStorage, mark: WriteMark) -> None:
    """Let a storage that takes another one's place have its mark."""
    storage.__dict__[_MARK] = mark


def storage_mark(storage: torch.UntypedStorage) -> WriteMark | None:
    """The mark of a storage, if it has one."""
    return storage.__dict__.get(_MARK)


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of writes: it sees those that C++ does, but not those through `.data`."""
    try:
        return _version(tensor)
    except RuntimeError:  # made in inference mode, which counts nothing
        return 0


def note_write(tensor: torch.Tensor) -> None:
    """Counts a write that has just been done to a tensor."""
    try:
        storage = storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and functorch's tensors have no storage
        note_unknown_write()
        return
    note_storage_write(storage)


def note_storage_write(storage: torch.UntypedStorage) -> None:
    """Counts a write that has just been done to a storage."""
    global writes  # noqa: PLW0603 - one number a process is the point of it
    number = next(_numbers)
    mark = storage.__dict__.get(_MARK)
    if mark is not None:
        mark.epoch = number
    writes = number


def note_unknown_write() -> None:
    """Counts a write to a storage that cannot be told."""
    global writes  # noqa: PLW0603 - see above
    writes = next(_numbers)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of any tensor, without marking it."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the documented way to step aside
        return _untyped_storage(tensor)


def note_all(values: Iterable[Any]) -> None:
    """Counts a write to every tensor among some values, lists of tensors included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            note_write(value)
        elif isinstance(value, list | tuple):
            note_all(value)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Has a CPU tensor answer that its memory is pinned."""
    storage_of(tensor).__dict__[_PINNED] = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor was pinned."""
    return _PINNED in storage_of(tensor).__dict__
