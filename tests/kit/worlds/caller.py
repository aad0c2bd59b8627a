"""A data channel's other end for tests: defines programs, calls them, reads the results."""

import fcntl
import gc
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from gpu_manager.devices.image_file import ImageFile
from gpu_manager.devices.worker_device import DeviceImage
from gpu_manager.emulated.cpu_arithmetic import CpuArithmetic
from gpu_manager.emulated.process_memory import trim_malloc
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.call import CallAnswer
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.channel_server import CallObservers, ChannelServer, Programs
from gpu_manager.worker.executor import Executor
from gpu_manager.worker.features import ModelFeature, ModelSpace, WorkerFeature, WorkerSpace
from gpu_manager.worker.orders import Admission, WorkerOrder
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.tensor_specs import DTYPES, NAMES
from torch_shim.wire.messages import CallResult, SentOutput
from torch_shim.wire.programs import Program, ProgramStep, Tuple, digest_of
from torch_shim.wire.protocol import Frame, FrameKind, FrameSocket, aligned

Part = TypeVar("Part", bound=ModelFeature)

LEASE = 7
DIGEST = "d" * 64
NO_LIMIT = 1 << 40
_STAYS = -2  # where the offset of bytes would stand that the worker did not send


def program(*steps: ProgramStep, inputs: int = 1, output: Sequence[Any], **more: Any) -> Program:
    """A program that gives these values."""
    return Program(inputs, more.pop("constants", ()), steps, Tuple(list(output)), **more)


def step(operator: str, *arguments: Any, **named: Any) -> ProgramStep:
    """One step."""
    return ProgramStep(operator, list(arguments), named)


def sealed_image(*tensors: torch.Tensor) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """An image's descriptor, table and size."""
    table, end = [], 0
    for tensor in tensors:
        table.append((end, tensor.numel() * tensor.element_size()))
        end = aligned(end + table[-1][1])
    descriptor = os.memfd_create("image", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, end)
    for (offset, _), tensor in zip(table, tensors, strict=True):
        os.pwrite(descriptor, raw(tensor), offset)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)
    return descriptor, tuple(table), end


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's elements."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def weight(table: Sequence[tuple[int, int]], number: int, like: torch.Tensor) -> list[Any]:
    """How the wire describes a storage of the image that holds a tensor like this one."""
    source = [0, DIGEST, *table[number]]
    return [source, NAMES[like.dtype], list(like.shape), list(like.stride()), 0]


class CallFailed(Exception):
    """The worker answered FAILED."""

    def __init__(self, failure: str, message: str, facts: dict[str, Any]) -> None:
        super().__init__(failure, message)
        self.failure = failure
        self.message = message
        self.facts = facts


@dataclass
class Reply:
    """A result, read."""

    outputs: list[Any]
    changed: dict[int, torch.Tensor]
    rng: bytes | None
    meta: CallResult
    sizes: list[int]


class Caller:
    """The shim's end of one channel. Numbers the programs and bindings itself."""

    def __init__(self, connection: socket.socket, arena_bytes: int = 0) -> None:
        self.wire = FrameSocket(connection)
        self.memory: Any = None
        self._numbers = 0
        self._programs: dict[str, int] = {}
        if arena_bytes:
            self.memory = self.arena(arena_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def arena(self, size: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> mmap.mmap:
        """Share memory with the worker."""
        descriptor = os.memfd_create("arena", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            self.ask(FrameKind.ARENA, [size], descriptors=[descriptor])
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def ask(
        self, kind: FrameKind, meta: Any, body: Sequence[Any] = (), descriptors: Sequence[int] = ()
    ) -> Frame:
        """Send a request; CallFailed for FAILED."""
        self.wire.send(kind, meta, body, descriptors)
        frame = self.wire.receive()
        if frame.kind is FrameKind.FAILED:
            raise CallFailed(*frame.meta)
        return frame

    def define(self, what: Program) -> int:
        """The program's number, after it was sent once."""
        packed = what.pack()
        digest = digest_of(packed)
        if digest not in self._programs:
            self._numbers += 1
            self.ask(FrameKind.DEFINE, [self._numbers, digest], [packed])
            self._programs[digest] = self._numbers
        return self._programs[digest]

    def bind(self, what: Program, tensors: dict[int, Any]) -> int:
        """A new binding's number."""
        number = self.define(what)
        self._numbers += 1
        self.ask(FrameKind.BIND, [number, self._numbers, tensors])
        return self._numbers

    def call(
        self,
        what: Program,
        *inputs: Any,
        lease: int = LEASE,
        binding: int | None = None,
        options: Sequence[Any] = (),
        keys: Sequence[int] = (),
    ) -> Reply:
        """Run it. Tensors are sent; lists and numbers go as they are; `keys` keeps sent tensors.

        `options` are the first ones of the call; the others say nothing.
        """
        number = self.define(what)
        area = self.memory if self.memory is not None else bytearray(1 << 20)
        described, end = self._write(area, inputs, keys)
        body = () if self.memory is not None or not end else (area[:end],)
        meta = [lease, number, binding, described, list(options)]
        return self.read(self.ask(FrameKind.CALL, meta, body))

    def read(self, frame: Frame) -> Reply:
        """A RESULT as tensors."""
        result: CallResult = frame.meta
        storages, changed = result.storages, result.changed
        entries = [(part.offset, part.size_bytes) for part in storages]
        entries += [(part.offset, part.size_bytes) for part in changed]
        source: Any = self.memory
        if frame.descriptors:
            (descriptor,) = frame.descriptors
            source = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)
            os.close(descriptor)
        elif len(frame.body) or self.memory is None:
            source = frame.body
        found, end = [], 0
        for offset, size in entries:
            if offset == _STAYS:
                found.append(bytearray())
                continue
            start = end if offset < 0 else offset
            end = aligned(start + size)
            found.append(bytearray(source[start : start + size]))
        outputs = [_output(view, found) for view in result.views]
        new = zip(changed, found[len(storages) :], strict=True)
        return Reply(
            outputs,
            {
                entry.position: torch.frombuffer(data, dtype=torch.uint8)
                if data
                else torch.empty(0)
                for entry, data in new
            },
            result.rng,
            result,
            [size for _, size in entries],
        )

    def _write(
        self, area: Any, inputs: Sequence[Any], keys: Sequence[int]
    ) -> tuple[list[Any], int]:
        described, end = [], 0
        for number, value in enumerate(inputs):
            if not isinstance(value, torch.Tensor):
                described.append(value)
                continue
            size = value.untyped_storage().nbytes()
            whole = torch.empty(0, dtype=torch.uint8).set_(
                value.untyped_storage(), 0, (size,), (1,)
            )
            area[end : end + size] = whole.numpy().tobytes()
            key = keys[number] if number < len(keys) else 0
            shape, strides = list(value.shape), list(value.stride())
            described.append(
                [[2, end, size, key, 0], NAMES[value.dtype], shape, strides, value.storage_offset()]
            )
            end = aligned(end + size)
        return described, end


def _output(view: Any, storages: list[bytearray]) -> Any:
    """A tensor, a number, or the description of an alias of an input."""
    if not isinstance(view, SentOutput) or view.source < 0:
        return view
    name, shape, strides, offset = view.dtype, view.shape, view.strides, view.offset
    data = storages[view.source]
    if not data:  # it has no elements, or stays with the worker
        return torch.empty(shape, dtype=DTYPES[name])
    flat = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=DTYPES[name]).set_(flat, offset, shape, strides)


class LocalWorker:
    """A worker's insides in this process, with a lease in force and weights loaded."""

    def __init__(
        self,
        *weights: torch.Tensor,
        limit_bytes: int = NO_LIMIT,
        features: Sequence[type[WorkerFeature]] = (),
    ) -> None:
        self.ended: list[int] = []
        self.ran: list[int] = []
        self.notes: list[str] = []
        self.traces: list[str] = []  # that the notes are about
        self.lost = threading.Event()  # a worker process would end now
        self.pressures: list[int] = []
        self.relief: tuple[int | None, bool] = (None, False)
        if limit_bytes < NO_LIMIT:
            # Needs are measured above what this process has now: without what may go meanwhile.
            gc.collect()
            trim_malloc()
        self.device = CpuArithmetic()
        together = CallsTogether()
        self.leases = AdmittedLeases(self.ended.append, lambda *_: None, together.clocks)
        self.table = OperatorTable(self.device.device)
        self.executor = Executor(self.device, self.leases, self._relieve, together)
        self.programs = Programs(self.table)
        self.told: list[WorkerOrder] = []  # by features
        worker = WorkerSpace(self._tell, lambda work: work())
        space = ModelSpace(3, self.executor, lambda text: self._note(text, ""))
        self.parts = [feature(worker).begin(space) for feature in features]
        for part in self.parts:
            self.executor.extend(part.park, part.stand_in())
        if weights:
            descriptor, self.weights, total = sealed_image(*weights)
            file = ImageFile(DIGEST, [list(entry) for entry in self.weights], total, descriptor)
            self.executor.images[DIGEST] = DeviceImage(file, self.device)
        self.executor.memory.set_limit(limit_bytes)
        self._threads: list[threading.Thread] = []

    def connect(self, session: str = "s", arena_bytes: int = 0) -> Caller:
        """A new channel of this session, which holds the lease from now on."""
        self.leases.admit(Admission(LEASE, session))
        ours, theirs = socket.socketpair()
        frames = {kind: answer for part in self.parts for kind, answer in part.frames.items()}
        recorders = [part.recorder for part in self.parts if part.recorder is not None]
        recorder = recorders[0] if recorders else None
        reports = CallObservers(self._note_run, self._note, self.lost.set, frames, recorder)
        parts = self.executor, self.programs, reports
        server = ChannelServer(theirs, session, "f", *parts)
        self.serve(server)
        return Caller(ours, arena_bytes)

    def part(self, kind: type[Part]) -> Part:
        """What a feature of the worker has of the model."""
        return next(part for part in self.parts if isinstance(part, kind))

    def serve(self, server: ChannelServer) -> None:
        """Serve a channel on a thread of its own."""
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Wait until every channel's thread has ended."""
        for thread in self._threads:
            thread.join()
            assert not thread.is_alive()

    def _note_run(self, lease: int, session: str, answer: CallAnswer) -> None:
        del session, answer
        self.ran.append(lease)

    def _tell(self, order: WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        del descriptors
        self.told.append(order)

    def _note(self, text: str, trace: str) -> None:
        self.notes.append(text)
        self.traces.append(trace)

    def _relieve(self, _: int, need_bytes: int) -> tuple[int | None, bool]:
        self.pressures.append(need_bytes)
        return self.relief
