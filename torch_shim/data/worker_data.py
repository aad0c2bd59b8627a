"""What workers have of functions' data: they take it where it lies, and keep it for others.

A storage that came from another function's data has an origin, which holds as long as nobody has
written to the storage here: workers take the same data without a copy.
"""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from torch_shim.data.node_requests import FoundData, NodeRequests
from torch_shim.errors import BadFrame, ConnectionLost, DataUnavailable, RemoteFailure
from torch_shim.tensors import write_epochs
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.manager_session import Content, Fetched, WorkerPeer
from torch_shim.wire.messages import Done, Publish, Take
from torch_shim.wire.protocol import FrameKind
from torch_shim.wire.shared_memory import LentPages

log = logging.getLogger("torch_shim")

_ORIGIN = "_gpufaas_data"

# The workers that use some data, each by its key there.
Taken = list[tuple[WorkerPeer, int]]


@dataclass(slots=True)
class DataOrigin:
    """Where a storage's bytes lie: with a worker's `process`, in a file from `start` on, or both.

    `content` is the storage's when it had these bytes.
    """

    handle: str
    size_bytes: int
    process: str = ""
    start: int = 0
    file: LentPages | None = None
    content: Content = (0, 0)
    taken: Taken = field(default_factory=list)


def note_origin(tensor: torch.Tensor, origin: DataOrigin) -> None:
    """Record where the bytes of a tensor's storage came from; it has just been made."""
    origin.content = write_epochs.content_of(tensor)
    write_epochs.storage_of(tensor).__dict__[_ORIGIN] = origin


def take_at_worker(
    storage: torch.UntypedStorage,
    key: int,
    content: Content,
    peer: WorkerPeer,
    channel: DataChannel,
) -> bool:
    """Have a worker use another function's data where that lies; whether it does."""
    origin: Any = storage.__dict__.get(_ORIGIN)
    if not isinstance(origin, DataOrigin) or origin.content != content:
        return False
    file = origin.file if origin.file is not None and origin.file.descriptor >= 0 else None
    takes: list[Take] = []
    if origin.process == process_of(peer.name) or (
        file is None and _can_take(peer, origin.handle, origin.process)
    ):
        takes.append(Take(key, origin.handle))
    if file is not None and channel.wire.local:
        takes.append(Take(key, "", origin.start, origin.size_bytes))
    for take in takes:
        try:
            if take.handle and _take(channel, take)[0] != origin.size_bytes:
                raise BadFrame("data has another size with its worker")
            if not take.handle and file is not None:
                channel.ask(FrameKind.TAKE, take, descriptors=[file.descriptor])
        except RemoteFailure as refused:
            log.info("a worker does not take data: %s", refused)
        else:
            peer.kept.result(key, content)
            origin.taken.append((peer, key))
            return True
    return False


def take_new(peer: WorkerPeer, handle: str, key: int) -> tuple[int, bytes] | None:
    """Have a worker keep data that this process knows nothing of: its size and description.

    None if the worker has not got it, or all channels to it are in use.
    """
    channel = peer.take()
    if channel is None:
        return None
    try:
        return _take(channel, Take(key, handle))
    except RemoteFailure:
        return None
    except ConnectionLost:
        peer.mark_lost()
        return None
    finally:
        peer.give(channel)


def publish(channel: DataChannel, kept: Publish) -> str:
    """Let other functions use a kept storage; return the handle of its data.

    RemoteFailure if the manager has to be asked for a handle.
    """
    answer: Done = channel.ask(FrameKind.PUBLISH, kept).meta
    return answer.handle


def process_of(worker: str) -> str:
    """The process of a model's worker, which may have other models."""
    return worker.rpartition(".")[0]


def _take(channel: DataChannel, take: Take) -> tuple[int, bytes]:
    """Have the worker keep data that was published there; return its size and description."""
    answer: Done = channel.ask(FrameKind.TAKE, take).meta
    if not answer.size_bytes:
        raise BadFrame("data without bytes")
    return answer.size_bytes, answer.about


def _can_take(peer: WorkerPeer, handle: str, process: str) -> bool:
    """Whether the worker may have data by its handle, of which this process has the bytes."""
    if process == process_of(peer.name):
        return True
    return process != "" and handle.startswith(f"{peer.node}.")


@dataclass(slots=True, eq=False)
class DataHolder:
    """Who has the bytes of data: its manager, which brings them from a worker if need be.

    A `peer` keeps the bytes for this process, whatever becomes of the data.
    """

    requests: NodeRequests
    handle: str
    process: str
    taken: Taken
    peer: WorkerPeer | None = None
    sole: set[int] = field(default_factory=set)

    def is_with(self, peer: WorkerPeer) -> bool:
        """Whether the worker takes the bytes where they are: they are its own, or it borrows them.

        What another worker keeps for this process is fetched from there, before a call.
        """
        if self.peer is not None:
            return self.process == process_of(peer.name)
        return _can_take(peer, self.handle, self.process)

    @contextmanager
    def channel_for(self, channel: Any) -> Iterator[Any]:
        """A channel of the worker that keeps the bytes, if one does."""
        if self.peer is None:
            yield None
            return
        with self.peer.channel_for(channel) as using:
            yield using

    def fetch(self, key: int, channel: Any) -> Fetched:
        """Return the bytes; DataUnavailable if they are lost."""
        try:
            data = self.requests.find(self.handle, here=True)
        except DataUnavailable:
            if self.peer is None or channel is None:
                raise
            return self.peer.fetch(key, channel)
        if data.descriptor is None:
            return Fetched(None, memoryview(self.requests.content(data)))
        lent = lent_file(self.requests, data, self.taken)
        return Fetched(data.descriptor, memoryview(b""), lent)

    def drop(self, key: int) -> None:
        """Nobody here needs the bytes any more: workers that took them forget them."""
        del key
        drop_taken(self.taken)


def lent_file(requests: NodeRequests, data: FoundData, taken: Taken) -> LentPages | None:
    """Return what is held while the file is mapped; None for one on disk, which nobody reuses."""
    assert data.descriptor is not None, "it is in a file"
    give_back = partial(_given_back, requests, data, taken)
    try:
        sealed = fcntl.fcntl(data.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed:
        requests.give_back(data.session, data.handle)
        return None
    return LentPages(give_back)


def _given_back(requests: NodeRequests, data: FoundData, taken: Taken) -> None:
    drop_taken(taken)
    requests.give_back(data.session, data.handle)


def drop_taken(taken: Taken) -> None:
    while taken:
        peer, key = taken.pop()
        peer.drop(key)
