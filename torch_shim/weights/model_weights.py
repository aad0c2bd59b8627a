"""A model's weights as the node knows them: one image, uploaded once, named by its content."""

import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from torch_shim.errors import RemoteFailure
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction
from torch_shim.weights.image_memory import MEMORY_NAME, SEALS, ImageMemories, ImageMemory
from torch_shim.wire.arena import flat, tensor_over
from torch_shim.wire.image_digests import (
    FilePart,
    ImageTable,
    image_digest,
    lay_out,
    parts_of,
    possession_proof,
)
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.protocol import FailureKind, FrameKind

log = logging.getLogger("gpufaas")

_CHUNK_BYTES = 16 << 20
# Of one session; one that is forgotten is offered once more.
_MOST_ACCEPTED = 256


class StoragePlace(NamedTuple):
    """Where a storage lies in an image, and what told its content when it was put there."""

    offset: int
    size_bytes: int
    epoch: int
    version: int


_Found = tuple[write_epochs.WriteMark, torch.UntypedStorage, int]


class Accepted:
    """The digests that each session's manager has accepted, for as long as the session lasts.

    A session that lost its connection has another name when it is made anew.
    """

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[ManagerSession, tuple[str, dict[str, None]]] = (
            WeakKeyDictionary()
        )

    def add(self, digest: str, session: ManagerSession, name: str) -> None:
        """The session has these weights under this name of its own."""
        known, digests = self._found.get(session, ("", {}))
        if known != name:
            digests = {}
            self._found[session] = name, digests
        digests[digest] = None
        if len(digests) > _MOST_ACCEPTED:
            del digests[next(iter(digests))]

    @property
    def sessions(self) -> int:
        """How many sessions have accepted anything."""
        return len(self._found)

    def has(self, digest: str, session: ManagerSession) -> bool:
        """Whether the session, as it is now, has these weights."""
        name, digests = self._found.get(session, ("", {}))
        return name == session.name and digest in digests

    def forget(self, digest: str) -> None:
        """Some node does not have them."""
        for _, digests in self._found.values():
            digests.pop(digest, None)


class ModelImage:
    """The weights under one root module, as they were when the image was made."""

    def __init__(self, digest: str, table: ImageTable, places: dict[int, StoragePlace]) -> None:
        self.digest = digest
        self.table = table
        self._places = places
        self.delivered = Accepted()

    def is_at(self, session: ManagerSession) -> bool:
        """Whether the session's node has it."""
        return self.delivered.has(self.digest, session)

    def is_of(self, digest: str, places: dict[int, StoragePlace]) -> bool:
        """Whether this is the model of these weights."""
        return self.digest == digest and self._places == places

    def place_of(self, mark: write_epochs.WriteMark, version: int) -> StoragePlace | None:
        """Where this storage lies in the image, unless it was written to since."""
        place = self._places.get(mark.key)
        same = place is not None and place.epoch == mark.epoch and place.version == version
        return place if same else None

    def covers(self, key: int) -> bool:
        """Whether the storage was part of the image, changed since or not."""
        return key in self._places


class ProcessWeights:
    """Makes the images of this process's models and brings them to the node, each once."""

    def __init__(self, memories: ImageMemories) -> None:
        self._memories = memories
        self._lock = threading.Lock()
        self._accepted = Accepted()

    def build(
        self,
        tensors: Iterable[torch.Tensor],
        session: ManagerSession,
        known: ModelImage | None = None,
    ) -> ModelImage | None:
        """The model of these weights, which the node has when this returns; None for none.

        The one that is known, if nothing has changed since it was made.
        """
        found = list(_storages(tensors))
        table = lay_out(storage.nbytes() for _, storage, _ in found)
        if not table.storages:
            return None
        with self._lock:
            name = session.control.session
            epochs = [mark.epoch for mark, _, _ in found]
            digest = self._brought(found, table, session)
        places = {
            mark.key: StoragePlace(offset, size, epoch, version)
            for (mark, _, version), (offset, size), epoch in zip(
                found, table.storages, epochs, strict=True
            )
        }
        if known is None or not known.is_of(digest, places):
            known = ModelImage(digest, table, places)
        known.delivered.add(digest, session, name)
        return known

    def forget(self, model: ModelImage) -> None:
        """A node says that it does not have these weights: bring them anew wherever they go."""
        with self._lock:
            self._accepted.forget(model.digest)
            model.delivered.forget(model.digest)

    def _brought(self, found: list[_Found], table: ImageTable, session: ManagerSession) -> str:
        """Have the node hold this content; the digest that names it there."""
        memory = self._memories.find([storage for _, storage, _ in found])
        hashed = None
        if memory is not None and memory.sealed is None:
            hashed = self._settle(memory, session)
            if self._accepted.has(hashed, session):
                return hashed
        now = tuple((mark.epoch, version) for mark, _, version in found)
        if memory is not None and memory.sealed == now:
            return self._deliver(memory.descriptor, table, session, hashed)
        descriptor = _image([storage for _, storage, _ in found], table)
        try:
            return self._deliver(descriptor, table, session)
        finally:
            os.close(descriptor)

    def _settle(self, memory: ImageMemory, session: ManagerSession) -> str:
        """Take the node's pages for our own where it has this content; else only seal ours.

        The digest is that of the content before the seal.
        """
        parts = parts_of(memory.descriptor, memory.table)
        digest = image_digest(parts)
        copy, name = None, session.control.session
        if not self._accepted.has(digest, session):
            copy = _prove(parts, memory.table, digest, session)
        if copy is None:
            memory.seal()
            return digest
        try:
            memory.seal(copy if session.control.wire.local else None)
        finally:
            if copy >= 0:
                os.close(copy)
        self._accepted.add(digest, session, name)
        return digest

    def _deliver(
        self, descriptor: int, table: ImageTable, session: ManagerSession, hashed: str | None = None
    ) -> str:
        """Prove to the node that we have what is in a sealed memfd, or send it.

        What was `hashed` before the seal was offered then: the node lacks it.
        """
        parts = parts_of(descriptor, table)
        digest = hashed or image_digest(parts)
        name = session.control.session
        if not self._accepted.has(digest, session):
            copy = _prove(parts, table, digest, session) if hashed is None else None
            if copy is None:
                try:
                    _upload(descriptor, table, digest, session)
                except RemoteFailure as failure:
                    if hashed is None or failure.failure != FailureKind.WEIGHTS:
                        raise
                    # Somebody wrote between the hash and the seal, and is not done counting it.
                    return self._deliver(descriptor, table, session)
            elif copy >= 0:
                os.close(copy)
            self._accepted.add(digest, session, name)
        return digest


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[_Found]:
    """Every storage of CUDA weights, once, with the version of a tensor over it."""
    seen: set[int] = set()
    for tensor in tensors:
        if not isinstance(tensor, CudaTensor) or tensor.layout is not torch.strided:
            continue
        mark, storage = write_epochs.marked(tensor), write_epochs.storage_of(tensor)
        if storage.nbytes() and mark.key not in seen:
            seen.add(mark.key)
            yield mark, storage, write_epochs.version_of(tensor)


def _image(found: list[torch.UntypedStorage], table: ImageTable) -> int:
    """A sealed memfd that holds these storages; nobody can change it any more."""
    descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, table.total_bytes)
        memory = mmap.mmap(descriptor, table.total_bytes)
        with NoTorchFunction(), torch.no_grad():
            for storage, (offset, size) in zip(found, table.storages, strict=True):
                source = tensor_over(storage, torch.uint8, 0, (size,), (1,))
                flat(memory, torch.uint8, offset, size).copy_(source)
        memory.close()
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _fields(table: ImageTable, digest: str) -> dict[str, Any]:
    rows = [list(entry) for entry in table.storages]
    return {"digest": digest, "table": rows, "total": table.total_bytes}


def _prove(
    parts: list[FilePart], table: ImageTable, digest: str, session: ManagerSession
) -> int | None:
    """Prove that we have what the node has: its descriptor, -1 from afar; None if it has it not."""
    control = session.control
    if not control.ask(FrameKind.OFFER, _fields(table, digest)).fields["have"]:
        return None
    proof = possession_proof(parts, control.welcome["nonce"])
    try:
        answer = control.ask(FrameKind.PROVE, {"digest": digest, "proof": proof})
    except RemoteFailure as failure:
        if failure.failure != FailureKind.WEIGHTS:
            raise
        log.info("the node's copy of the weights is gone again: %s", failure)
        return None
    return answer.descriptors[0] if answer.descriptors else -1


def _upload(descriptor: int, table: ImageTable, digest: str, session: ManagerSession) -> None:
    control, fields = session.control, _fields(table, digest)
    if control.wire.local:
        control.ask(FrameKind.UPLOAD, fields, descriptors=[descriptor])
        return
    control.ask(FrameKind.UPLOAD, fields)
    for offset in range(0, table.total_bytes, _CHUNK_BYTES):
        chunk = os.pread(descriptor, _CHUNK_BYTES, offset)
        last = offset + len(chunk) >= table.total_bytes
        control.ask(FrameKind.CHUNK, {"digest": digest, "offset": offset, "last": last}, [chunk])
