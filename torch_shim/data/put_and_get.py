"""What a function puts for others, and what it gets: `context.put`, `get` and `drop`."""

import contextlib
import fcntl
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from torch_shim.data.value_layout import (
    DescribedValue,
    Describer,
    Leaf,
    PartLeaf,
    Place,
    TensorLayout,
    pack_tensor,
)
from torch_shim.errors import (
    BadFrame,
    DataUnavailable,
    DataUnreachable,
    RemoteFailure,
    WireError,
)
from torch_shim.leases.managers import Nodes
from torch_shim.remote import inputs
from torch_shim.remote.inputs import DataOrigin
from torch_shim.remote.results import LEAST_BYTES
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import absent_of, bring, storage_without_bytes
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.messages import MOST_PARTS
from torch_shim.wire.protocol import FailureKind, FrameKind
from torch_shim.wire.shared_memory import (
    Buffer,
    LentPages,
    flat,
    layout_of,
    map_privately,
    tensor_over,
)
from torch_shim.wire.worker_peer import Fetched, WorkerPeer

log = logging.getLogger("gpufaas")

# A tensor that uses less than this share (1/N) of its storage is copied on its worker first.
_LEAST_SHARE = 2
# At its end a handle has as many of its worker's name.
TAG_CHARACTERS = 4


_SENT_PIECE_BYTES = 4 << 20
# What a manager says of data that it has not got; of a lost node it is said here.
GONE = (
    "there is no such data: it was dropped, its time was over, its node or worker is lost, "
    "or it never was this namespace's"
)
_REFUSALS = {FailureKind.NO_DATA, FailureKind.NO_ROOM, FailureKind.NOT_ALLOWED, FailureKind.LOST}

# Fills memory with the bytes that are put.
Fill = Callable[[Buffer], None]


class PutTerms(NamedTuple):
    """How long data lives, and whether the function's caller wished for it, who may be anybody."""

    lifetime_s: float | None = None
    wished: bool = False


class FoundData(NamedTuple):
    """What a manager says of data: a descriptor of its file, or the worker that has it alone.

    A local file's descriptor is the receiver's, who gives the file back. Without either, the bytes
    are to be had in pieces.
    """

    session: ManagerSession
    handle: str
    size_bytes: int
    about: bytes
    worker: str
    descriptor: int | None


class NodeRequests:
    """Requests about data, to this node's manager and to those of other nodes. Thread-safe."""

    def __init__(self, nodes: Callable[[], Nodes]) -> None:
        """`nodes` returns the process's sessions, which a fork and a reset make anew."""
        self._nodes = nodes
        self._returned: deque[tuple[ManagerSession, str]] = deque()

    @property
    def nodes(self) -> Nodes:
        return self._nodes()

    def put(
        self, size_bytes: int, about: bytes, terms: PutTerms, parts: list[str], fill: Fill
    ) -> str:
        """Put bytes into this node's memory; return the handle."""
        session = self.nodes.own
        fields = _fields(size_bytes, about, terms) | ({"parts": parts} if parts else {})
        try:
            answer = session.control.ask(FrameKind.PUT, fields)
            handle: str = answer.fields["handle"]
            if answer.descriptors:
                _fill_file(answer.descriptors[0], size_bytes, fill)
                last = {"handle": handle, "last": True}
                session.control.ask(FrameKind.PIECE, last)
            else:
                _send_pieces(session, handle, size_bytes, fill)
        except (RemoteFailure, WireError) as error:
            _refuse(error)
        return handle

    def put_on_worker(
        self,
        session: ManagerSession,
        size_bytes: int,
        about: bytes,
        terms: PutTerms,
        worker: str,
    ) -> str:
        """Note data that a worker of this manager has; RemoteFailure if it cannot be."""
        fields = _fields(size_bytes, about, terms) | {"worker": worker}
        handle: str = session.control.ask(FrameKind.PUT, fields).fields["handle"]
        return handle

    def find(self, handle: str, *, here: bool = False) -> FoundData:
        """Ask what data is, and, if it is to be `here`, for its bytes."""
        self.flush()
        try:
            answer = self._ask(self.nodes.own, handle, here=here)
        except (RemoteFailure, WireError) as error:
            _refuse(error)
        if isinstance(answer, FoundData):
            return answer
        try:
            second_answer = self._ask(self.nodes.reach(*answer), handle, here=here)
        except RemoteFailure as failure:
            _refuse(failure)
        except WireError as error:
            raise DataUnavailable(GONE) from error
        if not isinstance(second_answer, FoundData):
            raise DataUnavailable(GONE)
        return second_answer

    def content(self, data: FoundData) -> bytearray:
        """Return all bytes of data on another node, which come in pieces."""
        content = bytearray(data.size_bytes)
        try:
            with memoryview(content) as room:
                done = 0
                while done < data.size_bytes:
                    fields = {"handle": data.handle, "offset": done, "here": True}
                    body = data.session.control.ask(FrameKind.GET, fields).body or b""
                    if not body or done + len(body) > data.size_bytes:
                        raise BadFrame(f"a piece of {len(body)} bytes at {done}")
                    room[done : done + len(body)] = body
                    done += len(body)
        except RemoteFailure as failure:
            _refuse(failure)
        except WireError as error:
            raise DataUnavailable(GONE) from error
        return content

    def drop(self, handle: str) -> None:
        """End data; nothing if it has ended."""
        self.flush()
        session = self.nodes.own
        try:
            if handle.rpartition(".")[0] != session.node:
                answer = self._ask(session, handle, here=False)
                if not isinstance(answer, FoundData):
                    session = self.nodes.reach(*answer)
            session.control.notify(FrameKind.DISCARD, {"handle": handle})
        except RemoteFailure as failure:
            if failure.failure != FailureKind.NO_DATA:
                _refuse(failure)
        except WireError as error:
            _refuse(error)

    def give_back(self, session: ManagerSession, handle: str) -> None:
        """Note that a file is not mapped here any more; safe in a finalizer."""
        self._returned.append((session, handle))

    def flush(self) -> None:
        """Say which files are not mapped any more."""
        while self._returned:
            session, handle = self._returned.popleft()
            if session.connected:
                try:
                    session.control.notify(FrameKind.RETURN, {"handle": handle})
                except WireError:
                    continue  # the session has ended, and what it read with it

    def _ask(
        self, session: ManagerSession, handle: str, *, here: bool
    ) -> FoundData | tuple[list[str], str]:
        answer = session.control.ask(FrameKind.GET, {"handle": handle, "here": here})
        elsewhere = answer.fields.get("elsewhere")
        if elsewhere is not None:
            return elsewhere["addresses"], elsewhere["node"]
        descriptor = answer.descriptors[0] if answer.descriptors else None
        size, about = answer.fields.get("size"), answer.fields.get("about")
        worker = answer.fields.get("worker", "")
        if type(size) is not int or size < 0 or not isinstance(about, bytes):
            if descriptor is not None:
                os.close(descriptor)
            raise BadFrame("an answer about data of unknown shape")
        return FoundData(session, handle, size, about, str(worker), descriptor)


def _fields(size_bytes: int, about: bytes, terms: PutTerms) -> dict[str, object]:
    fields: dict[str, object] = {"size": size_bytes, "about": about}
    if terms.lifetime_s is not None:
        fields["lifetime_s"] = float(terms.lifetime_s)
    return fields | ({"wished": True} if terms.wished else {})


def _fill_file(descriptor: int, size_bytes: int, fill: Fill) -> None:
    try:
        if size_bytes:
            # All pages at once: a fault for each of them takes longer than the copy.
            how = mmap.MAP_SHARED | mmap.MAP_POPULATE
            with mmap.mmap(descriptor, size_bytes, flags=how) as memory:
                fill(memory)
    finally:
        os.close(descriptor)


def _send_pieces(session: ManagerSession, handle: str, size_bytes: int, fill: Fill) -> None:
    content = bytearray(size_bytes)
    if size_bytes:
        fill(content)
    whole = memoryview(content)
    for offset in range(0, max(size_bytes, 1), _SENT_PIECE_BYTES):
        piece = whole[offset : offset + _SENT_PIECE_BYTES]
        last = offset + len(piece) >= size_bytes
        fields = {"handle": handle, "offset": offset, "last": last}
        session.control.ask(FrameKind.PIECE, fields, (piece,))


def _refuse(error: RemoteFailure | WireError) -> NoReturn:
    """Raise what the function is told: of data that is not there one text, whatever the reason."""
    if isinstance(error, RemoteFailure):
        if error.failure not in _REFUSALS:
            raise error
        raise DataUnavailable(error.message) from error
    raise DataUnreachable(f"this node's GPU manager cannot be reached: {error}") from error


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
                size_and_about = peer.take_new(handle, key)
                if size_and_about is not None:
                    return taken_tensor(self._requests, handle, peer, key, *size_and_about)
        return None

    def drop(self, handle: str) -> None:
        self._requests.drop(handle)

    def settle(self) -> None:
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
        held = self._requests.nodes.holding(mark.key, content)
        if held is None or only not in (None, held[0]):
            return None
        return self._publish(tensor, mark.key, held, terms)

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


Taken = list[tuple[WorkerPeer, int]]


class DataHolder:
    """Who has the bytes of data: its manager, which brings them from a worker if need be."""

    def __init__(
        self,
        requests: NodeRequests,
        handle: str,
        process: str,
        taken: Taken,
        peer: WorkerPeer | None = None,
    ) -> None:
        """A `peer` keeps the bytes for this process, whatever becomes of the data."""
        self.sole: set[int] = set()
        self._requests = requests
        self._handle = handle
        self._process = process
        self._taken = taken
        self._peer = peer

    def is_with(self, peer: WorkerPeer) -> bool:
        """Whether the worker takes the bytes where they are: they are its own, or it borrows them.

        What another worker keeps for this process is fetched from there, before a call.
        """
        if self._peer is not None:
            return self._process == peer.process
        return peer.can_take(self._handle, self._process)

    @contextmanager
    def channel_for(self, channel: Any) -> Iterator[Any]:
        """A channel of the worker that keeps the bytes, if one does."""
        if self._peer is None:
            yield None
            return
        with self._peer.channel_for(channel) as using:
            yield using

    def fetch(self, key: int, channel: Any) -> Fetched:
        """Return the bytes; DataUnavailable if they are lost."""
        try:
            data = self._requests.find(self._handle, here=True)
        except DataUnavailable:
            if self._peer is None or channel is None:
                raise
            return self._peer.fetch(key, channel)
        if data.descriptor is None:
            return Fetched(None, memoryview(self._requests.content(data)))
        lent = lent_file(self._requests, data, self._taken)
        return Fetched(data.descriptor, memoryview(b""), lent)

    def drop(self, key: int) -> None:
        """Nobody here needs the bytes any more: workers that took them forget them."""
        del key
        _drop_taken(self._taken)


class GotValue:
    """One value that is made of data. Its leaves share the data's file."""

    def __init__(self, requests: NodeRequests, data: FoundData, *, is_part: bool = False) -> None:
        """Data that is part of other data has no parts itself."""
        self._requests = requests
        self._found = data
        self._is_part = is_part
        self._taken: Taken = []
        self._memory: Buffer = bytearray()
        self._lent: LentPages | None = None

    def make(self) -> Any:
        """Return the value; the file's descriptor is taken care of."""
        data = self._found
        try:
            described = DescribedValue(data.about, data.size_bytes)
        except BaseException:
            if data.descriptor is not None:
                os.close(data.descriptor)
                self._requests.give_back(data.session, data.handle)
            raise
        if data.descriptor is not None:
            self._lent = lent_file(self._requests, data, self._taken)
            self._memory = map_privately(data.descriptor, max(data.size_bytes, 1), self._lent)
        elif not data.worker:
            self._memory = self._requests.content(data)
        return described.build(self._tensor, self._bytes)

    def _bytes(self, place: Place) -> memoryview:
        if isinstance(place, PartLeaf):
            raise BadFrame("bytes are no data by themselves")
        whole = memoryview(self._memory)
        return whole[place.start : place.start + place.size_bytes].toreadonly()

    def _tensor(self, place: Place, layout: TensorLayout) -> torch.Tensor:
        if isinstance(place, PartLeaf):
            if self._is_part:
                raise BadFrame("a part of data that has parts")
            data = self._requests.find(place.handle)
            part = GotValue(self._requests, data, is_part=True).make()
            if not isinstance(part, torch.Tensor):
                raise BadFrame("a part of data that is no tensor")
            return part
        size = place.size_bytes
        if self._found.worker and self._found.descriptor is None:
            return self._absent(size, layout)
        dtype, shape, strides, offset, on_gpu = layout
        storage = flat(self._memory, torch.uint8, place.start, size).untyped_storage()
        made = tensor_over(storage, dtype, offset, shape, strides)
        if on_gpu:
            become_cuda(made)
            self._note(made, size, place.start)
        return made

    def _absent(self, size: int, layout: TensorLayout) -> torch.Tensor:
        data = self._found
        if not 0 < size == data.size_bytes:
            raise BadFrame("data of a worker is one tensor")
        holder = DataHolder(self._requests, data.handle, _process(data.worker), self._taken)
        made = _without_bytes(write_epochs.WriteMark(), size, layout, holder)
        self._note(made, size, 0)
        return made

    def _note(self, tensor: torch.Tensor, size: int, start: int) -> None:
        data = self._found
        if not size or (data.session is not self._requests.nodes.own and not data.worker):
            return
        process = _process(data.worker)
        origin = DataOrigin(data.handle, size, process, start, self._lent, taken=self._taken)
        inputs.note_origin(tensor, origin)


def taken_tensor(
    requests: NodeRequests, handle: str, peer: WorkerPeer, key: int, size: int, about: bytes
) -> torch.Tensor:
    """Return a tensor whose bytes a worker has, and keeps for this process under the key."""
    taken: Taken = [(peer, key)]

    def make(place: Place, layout: TensorLayout) -> torch.Tensor:
        if place.size_bytes != size:
            raise BadFrame("data of a worker is one tensor")
        mark = write_epochs.WriteMark(key)
        holder = DataHolder(requests, handle, peer.process, taken, peer)
        made = _without_bytes(mark, size, layout, holder)
        content = mark.epoch, write_epochs.version_of(made)
        peer.kept.result(key, content)
        origin = DataOrigin(handle, size, peer.process, taken=taken)
        inputs.note_origin(made, origin)
        return made

    try:
        made = DescribedValue(about, size).build(make, _no_bytes)
        if not isinstance(made, torch.Tensor):
            raise BadFrame("data of a worker is one tensor")
    except BaseException:
        _drop_taken(taken)
        raise
    return made


def _no_bytes(_: Place) -> memoryview:
    raise BadFrame("data of a worker is one tensor")


def _without_bytes(
    mark: write_epochs.WriteMark, size: int, layout: TensorLayout, holder: DataHolder
) -> torch.Tensor:
    storage = storage_without_bytes(mark, size)
    mark.absent.leave(holder, _nowhere)
    made = tensor_over(storage, layout.dtype, layout.offset, layout.shape, layout.strides)
    return become_cuda(made)


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
    _drop_taken(taken)
    requests.give_back(data.session, data.handle)


def _drop_taken(taken: Taken) -> None:
    while taken:
        peer, key = taken.pop()
        peer.drop(key)


def _process(worker: str) -> str:
    """The process of a model's worker, which may have other models."""
    return worker.rpartition(".")[0]


def _nowhere(*_: Any) -> None:
    """Operators between graphs run here: the bytes come for them."""
