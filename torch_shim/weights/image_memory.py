"""Memory laid out as a model's image, so that this process and the node share one copy of weights.

Weights that `.cuda()` has just created are moved into a memfd that only this process can write to.
When the weights are sent to the node, the mapping is replaced in place by a private one, and the
memfd is sealed: the node and its workers map the same pages, and later writes of this process go to
private pages. If the node has the same content already, its pages are mapped instead.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Self

import torch

from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaParameter, CudaTensor, NoTorchFunction
from torch_shim.wire.arena import flat, map_privately_at
from torch_shim.wire.image_digests import ImageTable, lay_out

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MEMORY_NAME = "gpufaas-weights"  # in /proc

_LEAST_BYTES = 1 << 20  # below that, a descriptor and a mapping cost more than a copy
_set = torch._C.TensorBase.set_  # noqa: SLF001 - the original, not the shim's replacement
_use_count = torch._C._storage_Use_Count  # noqa: SLF001 - shows whether a view exists
_PIECE_BYTES = 1 << 20

# Identifies the content of a storage: the mark's epoch, and autograd's count of writes.
Content = tuple[int, int]


class ImageMemory(mmap.mmap):
    """One image's memory, which exists as long as any storage in it."""

    table: ImageTable
    descriptor: int
    address: int
    sealed: tuple[Content, ...] | None  # the contents at the time of sealing
    digest: str | None  # that of the sealed content, once a node has accepted it
    _lock: threading.Lock
    _tensors: list[tuple[write_epochs.WriteMark, weakref.ref[torch.Tensor]]]

    @classmethod
    def make(cls, table: ImageTable) -> Self:
        """Create memory for an image of this layout."""
        descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, table.total_bytes)
            memory = cls(descriptor, table.total_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(memory, os.close, descriptor).atexit = False
        memory.table, memory.descriptor, memory.sealed = table, descriptor, None
        memory.digest = None
        memory.address = flat(memory, torch.uint8, 0, 1).data_ptr()
        memory._lock = threading.Lock()
        memory._tensors = []
        return memory

    def adopt(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Move these tensors into this memory, storage by storage; no other views may exist."""
        whole = flat(self, torch.uint8, 0, self.table.total_bytes).untyped_storage()
        for group, (offset, size) in zip(groups, self.table.storages, strict=True):
            former = write_epochs.storage_of(group[0])
            mark = write_epochs.mark_storage(former)
            storage = whole[offset : offset + size]
            storage.copy_(former)
            write_epochs.adopt_mark(storage, mark)
            for tensor in group:
                _set(tensor, storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            self._tensors.append((mark, weakref.ref(group[0])))

    def holds(self, found: Sequence[torch.UntypedStorage]) -> bool:
        """Whether these storages are exactly this image's, in its order."""
        places = [(storage.data_ptr() - self.address, storage.nbytes()) for storage in found]
        return places == list(self.table.storages)

    def contents(self) -> tuple[Content, ...]:
        """Return the identifiers of the storages' contents; they change with every write."""
        return tuple(map(_content, self._tensors))

    def seal(self, copy: int | None = None) -> None:
        """Make the memfd immutable; later writes of this process go to private pages.

        With the descriptor of a sealed `copy`, the copy's pages replace the memfd's.
        """
        with self._lock:
            if self.sealed is not None:
                return
            contents = self.contents()
            source = self.descriptor if copy is None else copy
            map_privately_at(self.address, self.table.total_bytes, source)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            if copy is not None:
                self._keep_late_writes(copy)
                os.dup2(copy, self.descriptor, inheritable=False)
            self.sealed = contents

    def _keep_late_writes(self, copy: int) -> None:
        """Apply writes that reached the memfd after its content was compared with the copy."""
        size = self.table.total_bytes
        with _read_only(self.descriptor, size) as written, _read_only(copy, size) as copied:
            for start in range(0, size, _PIECE_BYTES):
                stop = min(start + _PIECE_BYTES, size)
                if written[start:stop] != copied[start:stop]:
                    self[start:stop] = written[start:stop]


class ImageMemories:
    """Every image memory of this process."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[ImageMemory] = weakref.WeakSet()
        os.register_at_fork(before=self._before_fork)

    def lay_out_weights(self, tensors: Iterable[torch.Tensor], since: int) -> None:
        """Move these weights into an image memory, if all were created after the mark `since`."""
        groups = _by_storage(tensors)
        if groups is None:
            return
        table = lay_out(write_epochs.storage_of(group[0]).nbytes() for group in groups)
        if table.total_bytes < _LEAST_BYTES:
            return
        with NoTorchFunction(), torch.no_grad():
            if not all(_is_fresh(group, since) for group in groups):
                return
            memory = ImageMemory.make(table)
            memory.adopt(groups)
        self._alive.add(memory)

    def find(self, found: Sequence[torch.UntypedStorage]) -> ImageMemory | None:
        """Return the memory whose image consists of exactly these storages, if there is one."""
        return next((memory for memory in list(self._alive) if memory.holds(found)), None)

    def _before_fork(self) -> None:
        """Seal all memories: otherwise a child's writes would change its parent's weights."""
        for memory in list(self._alive):
            memory.seal()


def _read_only(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def _content(entry: tuple[write_epochs.WriteMark, weakref.ref[torch.Tensor]]) -> Content:
    mark, reference = entry
    tensor = reference()
    return mark.epoch, 0 if tensor is None else write_epochs.version_of(tensor)


def _by_storage(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]] | None:
    """Group CUDA weights by storage; None if any of them is not an ordinary strided tensor."""
    groups: dict[int, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) in seen or not isinstance(tensor, CudaTensor):
            continue
        seen.add(id(tensor))
        ordinary = type(tensor) in (CudaTensor, CudaParameter)
        if not ordinary or tensor.layout is not torch.strided or tensor.is_inference():
            return None
        storage = write_epochs.storage_of(tensor)
        if storage.nbytes():
            groups.setdefault(storage.data_ptr(), []).append(tensor)
    return list(groups.values()) or None


def _is_fresh(group: list[torch.Tensor], since: int) -> bool:
    """Whether only these tensors use their storage, and its mark is newer than `since`."""
    storage = write_epochs.storage_of(group[0])
    mark = write_epochs.storage_mark(storage)
    if mark is not None and (mark.epoch <= since or mark.untracked):
        return False
    return bool(_use_count(storage._cdata) == len(group) + 1)  # noqa: SLF001 - one use is `storage`
