"""What a function's handler puts for other functions, and gets: `context.put`, `get` and `drop`."""

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torch_shim.data.got_values import GotValue, taken_tensor
from torch_shim.data.node_requests import NodeRequests, PutTerms
from torch_shim.data.value_layout import (
    Describer,
    Leaf,
    PartLeaf,
    TensorLayout,
    pack_tensor,
)
from torch_shim.errors import DataUnavailable, RemoteFailure, WireError
from torch_shim.leases.managers import Nodes
from torch_shim.remote.staying_outputs import LEAST_BYTES
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import absent_of, bring
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction
from torch_shim.wire.arena import Buffer, flat, layout_of, tensor_over
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.protocol import MOST_PARTS, FrameKind
from torch_shim.wire.worker_peer import WorkerPeer

log = logging.getLogger("gpufaas")

# A tensor that uses less than this share (1/N) of its storage is copied on its worker first.
_LEAST_SHARE = 2
# At its end a handle has as many of its worker's name.
TAG_CHARACTERS = 4


class FunctionData:
    """The data of one process, put and got. Thread-safe."""

    def __init__(self, nodes: Callable[[], Nodes]) -> None:
        self._requests = NodeRequests(nodes)

    def put(self, value: Any, terms: PutTerms) -> str:
        """Put a value, as it is now, for the functions of this namespace; return its handle."""
        self._requests.flush()
        if isinstance(value, torch.Tensor):
            part = self._stay(value.detach(), terms)
            if part is not None:
                return part.handle
        parts: list[str] = []
        describer = Describer(partial(self._part, parts, terms._replace(wished=False)))
        try:
            about = describer.describe(value)
            fill = partial(_fill, describer.file_leaves)
            size_bytes = describer.size_bytes
            return self._requests.put(size_bytes, about, terms, describer.parts, fill)
        except BaseException:
            for handle in parts:
                with contextlib.suppress(DataUnavailable):
                    self._requests.drop(handle)
            raise

    def get(self, handle: str) -> Any:
        """Return a value that a function of this namespace has put; DataUnavailable if it is not
        to be had."""
        near = self._near(handle)
        if near is not None:
            return near
        return GotValue(self._requests, self._requests.find(handle)).make()

    def _near(self, handle: str) -> torch.Tensor | None:
        """Take data from a worker that has it, if this process is connected to that one."""
        tag = handle[-TAG_CHARACTERS:]
        for peer in self._requests.nodes.peers():
            if peer.name.startswith(tag):
                key = write_epochs.new_key()
                found = peer.take_new(handle, key)
                if found is not None:
                    return taken_tensor(self._requests, handle, peer, key, *found)
        return None

    def drop(self, handle: str) -> None:
        """End data before its time; nothing if it has ended."""
        self._requests.drop(handle)

    def settle(self) -> None:
        """Say what is not mapped here any more."""
        self._requests.flush()

    # -- what stays with its worker -------------------------------------------------------------

    def _part(self, parts: list[str], terms: PutTerms, tensor: torch.Tensor) -> PartLeaf | None:
        """Put a tensor of a larger value by itself, if a worker of this node has its bytes."""
        if len(parts) >= MOST_PARTS:
            return None
        part = self._stay(tensor, terms, only=self._requests.nodes.own)
        if part is not None:
            parts.append(part.handle)
        return part

    def _stay(
        self, tensor: torch.Tensor, terms: PutTerms, only: ManagerSession | None = None
    ) -> PartLeaf | None:
        """Have a worker publish a tensor that it has; None if the bytes are to be sent."""
        if type(tensor) is not CudaTensor:
            return None
        storage = write_epochs.storage_of(tensor)
        mark = write_epochs.storage_mark(storage)
        used = tensor.numel() * tensor.element_size()
        if mark is None or used < LEAST_BYTES:
            return None
        if _LEAST_SHARE * used < storage.nbytes():
            if absent_of(tensor) is None:
                return None
            tensor = tensor.clone()  # there
            mark = write_epochs.marked(tensor)
        content = mark.epoch, write_epochs.version_of(tensor)
        found = self._requests.nodes.holding(mark.key, content)
        if found is None or only not in (None, found[0]):
            return None
        return self._publish(tensor, mark.key, found, terms)

    def _publish(
        self,
        tensor: torch.Tensor,
        key: int,
        held: tuple[ManagerSession, WorkerPeer, int],
        terms: PutTerms,
    ) -> PartLeaf | None:
        session, peer, epoch = held
        size_bytes = write_epochs.storage_of(tensor).nbytes()
        dtype, shape, strides, offset = layout_of(tensor)
        about = pack_tensor(TensorLayout(dtype, shape, strides, offset, True), size_bytes)
        handle = ""
        try:
            if not terms.wished:  # the manager must know of a wish
                with contextlib.suppress(RemoteFailure), peer.channel_for(None) as channel:
                    if channel is not None:
                        return PartLeaf(
                            channel.put(key, epoch, about, terms.lifetime_s), size_bytes
                        )
            handle = self._requests.put_on_worker(session, size_bytes, about, terms, peer.name)
            with peer.channel_for(None) as channel:
                if channel is not None:
                    channel.publish(key, epoch, handle, about)
                    return PartLeaf(handle, size_bytes)
        except (RemoteFailure, WireError) as error:
            log.info("a tensor is put by its bytes: %s", error)
        if handle:
            with contextlib.suppress(WireError):
                session.control.notify(FrameKind.DISCARD, {"handle": handle})
        return None


def _fill(leaves: list[tuple[int, Leaf]], room: Buffer) -> None:
    """Copy leaves to their places."""
    for start, leaf in leaves:
        if isinstance(leaf, memoryview):
            room[start : start + len(leaf)] = leaf
        elif leaf.numel():
            _copy(leaf, room, start)


def _copy(tensor: torch.Tensor, room: Buffer, start: int) -> None:
    bring((tensor,))
    count = tensor.numel()
    dtype, shape, strides, offset = layout_of(tensor)
    source = tensor_over(write_epochs.storage_of(tensor), dtype, offset, shape, strides)
    with NoTorchFunction(), torch.no_grad():
        flat(room, torch.uint8, start, count * dtype.itemsize).view(dtype).view(shape).copy_(source)


_connected: list[FunctionData] = []


def connect(nodes: Callable[[], Nodes]) -> None:
    """Pass data by these sessions, from now on."""
    _connected[:] = [FunctionData(nodes)]


def put(value: Any, lifetime_s: float | None = None, *, wished: bool = False) -> str:
    """See FunctionData; DataUnavailable in a process without a GPU manager."""
    return _data().put(value, PutTerms(lifetime_s, wished))


def get(handle: str) -> Any:
    """See FunctionData; DataUnavailable in a process without a GPU manager."""
    return _data().get(handle)


def drop(handle: str) -> None:
    """See FunctionData; DataUnavailable in a process without a GPU manager."""
    _data().drop(handle)


def settle() -> None:
    """Say what this process does not map any more: after a request, no other may come for long."""
    if _connected:
        _connected[0].settle()


def _data() -> FunctionData:
    if not _connected:
        raise DataUnavailable("this function has no GPU manager to keep data; enable its GPU")
    return _connected[0]
