"""A model's weights as one image, uploaded to a node once and named by a digest of the content."""

import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from torch_shim.errors import NoWeights, RemoteFailure
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.handles import CudaParameter, CudaTensor, NoTorchFunction
from torch_shim.wire.image_digests import (
    FilePart,
    ImageTable,
    image_digest,
    lay_out,
    pack_sizes,
    parts_of,
    possession_proof,
)
from torch_shim.wire.manager_session import Content, ManagerSession
from torch_shim.wire.protocol import MAX_PIECE_BYTES, FailureKind, FrameKind
from torch_shim.wire.shared_memory import flat, map_privately_at, tensor_over

log = logging.getLogger("gpufaas")


class StoragePlace(NamedTuple):
    """The place of a storage in an image, and the epoch and version of the content placed there."""

    offset: int
    size_bytes: int
    epoch: int
    version: int


_Found = tuple[write_epochs.WriteMark, torch.UntypedStorage, int]


@dataclass(eq=False)
class ModelImage:
    """The weights under one root module, as they were when the image was created."""

    digest: str
    places: dict[int, StoragePlace]

    def place_of(self, mark: write_epochs.WriteMark, version: int) -> StoragePlace | None:
        """Return the place of this storage in the image; None if it was written to since."""
        place = self.places.get(mark.key)
        same = place is not None and place.epoch == mark.epoch and place.version == version
        return place if same else None


# Memory laid out as a model's image, so that this process and the node share one copy of weights.
#
# Weights that `.cuda()` has just created are moved into a memfd that only this process can write
# to. When the weights are sent to the node, the mapping is replaced in place by a private one, and
# the memfd is sealed: the node and its workers map the same pages, and later writes of this
# process go to private pages. If the node has the same content already, its pages are mapped
# instead.

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MEMORY_NAME = "gpufaas-weights"  # in /proc

_LEAST_BYTES = 1 << 20  # below that, a descriptor and a mapping cost more than a copy
_set = torch._C.TensorBase.set_  # noqa: SLF001 - the original, not the shim's replacement
_use_count = torch._C._storage_Use_Count  # noqa: SLF001 - shows whether a view exists
_PIECE_BYTES = 1 << 20


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

    def holds(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether these storages are exactly this image's, in its order."""
        places = [(storage.data_ptr() - self.address, storage.nbytes()) for storage in storages]
        return places == list(self.table.storages)

    def seal(self, copy: int | None = None) -> None:
        """Make the memfd immutable; later writes of this process go to private pages.

        With the descriptor of a sealed `copy`, the copy's pages replace the memfd's.
        """
        with self._lock:
            if self.sealed is not None:
                return
            contents = tuple(map(_content, self._tensors))
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


class ProcessWeights:
    """The weights of this process's models, and every image memory. Each image is sent once."""

    def __init__(self) -> None:
        self._memories: weakref.WeakSet[ImageMemory] = weakref.WeakSet()
        self._renew()
        os.register_at_fork(before=self._before_fork, after_in_child=self._renew)

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
        self._memories.add(memory)

    def find(self, storages: Sequence[torch.UntypedStorage]) -> ImageMemory | None:
        return next((memory for memory in list(self._memories) if memory.holds(storages)), None)

    def build(
        self,
        tensors: Iterable[torch.Tensor],
        session: ManagerSession,
        known: ModelImage | None = None,
    ) -> ModelImage:
        """Return the image of these weights after the node has it; NoWeights if there are none.

        The `known` image is returned if nothing has changed since it was created.
        """
        tensors = list(tensors)
        bring(tensors)
        storages = list(_storages(tensors))
        table = lay_out(storage.nbytes() for _, storage, _ in storages)
        if not table.storages:
            raise NoWeights
        with self._lock:
            session.connected_images()  # nothing is hashed for a manager that is not there
            epochs = [mark.epoch for mark, _, _ in storages]
            digest = self._bring(storages, table, session)
        places = {
            mark.key: StoragePlace(offset, size, epoch, version)
            for (mark, _, version), (offset, size), epoch in zip(
                storages, table.storages, epochs, strict=True
            )
        }
        if known is not None and (known.digest, known.places) == (digest, places):
            return known
        return ModelImage(digest, places)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def _before_fork(self) -> None:
        """Seal all memories: otherwise a child's writes would change its parent's weights."""
        for memory in list(self._memories):
            memory.seal()

    def _bring(self, storages: list[_Found], table: ImageTable, session: ManagerSession) -> str:
        """Return the digest of the content, which the node has then."""
        memory = self.find([storage for _, storage, _ in storages])
        hashed = None
        if memory is not None and memory.sealed is None:
            hashed = self._seal(memory, session)
            if hashed in session.images:
                return hashed
        now = tuple((mark.epoch, version) for mark, _, version in storages)
        if memory is not None and memory.sealed == now:
            # What is sealed is hashed once: a fork of this process has its digest.
            memory.digest = self._deliver(
                memory.descriptor, table, session, hashed, known=memory.digest
            )
            return memory.digest
        image = _image([storage for _, storage, _ in storages], table)
        return self._deliver(image.descriptor, table, session)

    def _seal(self, memory: ImageMemory, session: ManagerSession) -> str:
        """Seal the memory, and map the node's pages into it if the node has the same content.

        Return the digest of the content before the seal.
        """
        parts = parts_of(memory.descriptor, memory.table)
        digest = image_digest(parts)
        images, copy = session.connected_images(), None
        if digest not in images:
            copy = _prove(parts, digest, session, wanted=True)
        if copy is None:
            memory.seal()
            return digest
        try:
            memory.seal(copy if session.control.wire.local else None)
            memory.digest = digest if session.control.wire.local else None
        finally:
            if copy >= 0:
                os.close(copy)
        images[digest] = None
        return digest

    def _deliver(
        self,
        descriptor: int,
        table: ImageTable,
        session: ManagerSession,
        hashed: str | None = None,
        *,
        known: str | None = None,
    ) -> str:
        """Prove to the node that this process has the content of a sealed memfd, or send it.

        Content that was `hashed` before the seal was offered already, and the node lacks it. The
        digest of sealed content may be `known`.
        """
        parts = parts_of(descriptor, table)
        digest = hashed or known or image_digest(parts)
        images = session.connected_images()
        if digest not in images:
            copy = _prove(parts, digest, session) if hashed is None else None
            if copy is not None and copy >= 0:
                os.close(copy)
            if copy is None:
                try:
                    _upload(descriptor, table, digest, session)
                except RemoteFailure as failure:
                    if hashed is None or failure.failure != FailureKind.WEIGHTS:
                        raise
                    # Another thread wrote between the hash and the seal, and will count it later.
                    return self._deliver(descriptor, table, session)
            images[digest] = None
        return digest


process_weights = ProcessWeights()


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[_Found]:
    """Yield every storage of CUDA weights once, with its mark and the version of its tensor."""
    seen: set[int] = set()
    for tensor in tensors:
        if not isinstance(tensor, CudaTensor) or tensor.layout is not torch.strided:
            continue
        mark, storage = write_epochs.marked(tensor), write_epochs.storage_of(tensor)
        if storage.nbytes() and mark.key not in seen:
            seen.add(mark.key)
            yield mark, storage, write_epochs.version_of(tensor)


def _image(storages: list[torch.UntypedStorage], table: ImageTable) -> ImageMemory:
    """Return sealed memory with the content of these storages."""
    memory = ImageMemory.make(table)
    with NoTorchFunction(), torch.no_grad():
        for storage, (offset, size) in zip(storages, table.storages, strict=True):
            source = tensor_over(storage, torch.uint8, 0, (size,), (1,))
            flat(memory, torch.uint8, offset, size).copy_(source)
    memory.seal()
    return memory


def _prove(
    parts: list[FilePart], digest: str, session: ManagerSession, *, wanted: bool = False
) -> int | None:
    """Prove, if need be, that this process has weights which the node has too.

    What another process of the function has sent or proven needs no proof: the right to use weights
    is the function's. Return a descriptor of the node's copy, -1 if the node is remote or the copy
    is not `wanted`, None if the node lacks the weights.
    """
    offered = session.control.ask(FrameKind.OFFER, {"digest": digest}).fields
    is_ours = offered.get("yours")
    if is_ours and not wanted:
        return -1
    if not offered["have"]:
        return None
    claim = {"digest": digest}
    if not is_ours:
        claim["proof"] = possession_proof(parts, session.control.welcome["nonce"])
    try:
        answer = session.control.ask(FrameKind.PROVE, claim)
    except RemoteFailure as failure:
        if failure.failure not in (FailureKind.WEIGHTS, FailureKind.UNKNOWN_MODEL):
            raise
        log.info("the node has dropped its copy of the weights: %s", failure)
        return None
    return answer.descriptors[0] if answer.descriptors else -1


def _upload(descriptor: int, table: ImageTable, digest: str, session: ManagerSession) -> None:
    control = session.control
    fields = {"digest": digest, "total": table.total_bytes, "sizes": pack_sizes(table)}
    if control.wire.local:
        control.ask(FrameKind.UPLOAD, fields, descriptors=[descriptor])
        return
    control.ask(FrameKind.UPLOAD, fields)
    for offset in range(0, table.total_bytes, MAX_PIECE_BYTES):
        chunk = os.pread(descriptor, MAX_PIECE_BYTES, offset)
        last = offset + len(chunk) >= table.total_bytes
        control.ask(FrameKind.CHUNK, {"digest": digest, "offset": offset, "last": last}, [chunk])
