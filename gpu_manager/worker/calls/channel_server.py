"""A data channel's loop: read a request, answer it, until the shim hangs up or talks nonsense."""

import fcntl
import hashlib
import mmap
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.call_errors import CallRefused, ContextLost
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.executor import CallAnswer, Executor, read_call
from gpu_manager.worker.calls.results import offsets_behind
from gpu_manager.worker.device.worker_device import SharedArea, WorkerDevice
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.channel_state import ChannelState
from gpu_manager.worker.program.inputs import NO_AREA
from torch_shim.errors import BadFrame, ConnectionLost
from torch_shim.wire.frame_socket import Frame, FrameSocket
from torch_shim.wire.programs import unpack
from torch_shim.wire.protocol import FailureKind, FrameKind

_F_GET_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1034, 2, 4
_ARENA_SEALS = _F_SEAL_SHRINK | _F_SEAL_GROW
_MOST_PROGRAMS = 1024
# What a program that passes the checks can still raise while it is built.
_BUILD_ERRORS = (TypeError, ValueError, RuntimeError, LookupError, SyntaxError, MemoryError)


class Programs:
    """Programs built in this worker, by digest: channels share them."""

    def __init__(self, table: OperatorTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._built: OrderedDict[str, BuiltProgram] = OrderedDict()

    def get(self, digest: Any, packed: memoryview) -> BuiltProgram:
        """The program of these bytes, built once."""
        if hashlib.sha256(packed).hexdigest() != digest:
            raise CallRefused(FailureKind.PROGRAM, "the program is not what its digest says")
        with self._lock:
            built = self._built.get(digest)
            if built is None:
                built = self._built[digest] = self._build(digest, packed)
                if len(self._built) > _MOST_PROGRAMS:
                    self._built.popitem(last=False)
            self._built.move_to_end(digest)
            return built

    def _build(self, digest: str, packed: memoryview) -> BuiltProgram:
        try:
            return BuiltProgram(digest, unpack(packed), self._table)
        except (BadFrame, *_BUILD_ERRORS) as error:
            raise CallRefused(FailureKind.PROGRAM, str(error)[:500]) from error


class CallObservers(NamedTuple):
    """Callbacks of a channel for what the manager must learn."""

    ran: Callable[[int, CallAnswer], None]
    note: Callable[[str, str], None]  # and the trace that it is about, if that is known
    lost: Callable[[], object] = lambda: None  # the worker cannot use its GPU any more


class ChannelServer:
    """Serves one channel of one session on its own thread."""

    def __init__(
        self,
        connection: socket.socket,
        session: str,
        executor: Executor,
        leases: AdmittedLeases,
        programs: Programs,
        reports: CallObservers,
    ) -> None:
        self._wire = FrameSocket(connection, eager=True)
        self._session = session
        self._executor = executor
        self._leases = leases
        self._programs = programs
        self._reports = reports
        self._state = ChannelState(executor.sessions.open(session))
        self._share: SharedArea | None = None
        self._trace = ""  # of the last call
        self._handlers: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.ARENA: self._take_arena,
            FrameKind.DEFINE: self._define,
            FrameKind.BIND: self._bind,
            FrameKind.CALL: self._call,
            FrameKind.DROP: self._drop,
        }

    def serve(self) -> None:
        """Answer requests in order until the channel ends."""
        torch.set_grad_enabled(False)
        try:
            while True:
                self._answer(self._wire.receive())
        except ConnectionLost:
            pass
        except (BadFrame, MemoryError) as error:
            text = f"channel of session {self._session} closed: {error}"
            self._reports.note(text, self._trace)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of everything; nobody serves the channel any more."""
        self._wire.close()
        self._executor.sessions.close(self._session)
        self._state.close()
        self._share = self._executor.share(NO_AREA, self._share)
        self._handlers.clear()  # they hold this object: nothing should wait for the collector

    def _answer(self, frame: Frame) -> None:
        handler = self._handlers.get(frame.kind)
        try:
            if handler is None:
                raise BadFrame(f"{frame.kind.name} on a data channel")
            handler(frame)
        except CallRefused as refused:
            self._wire.send(FrameKind.FAILED, [refused.failure, refused.detail, refused.facts])
        except (ContextLost, RuntimeError) as error:
            lost = _lost_context(error)
            if lost is None:
                raise
            self._end_worker(lost)
            raise ConnectionLost("the worker ends") from error
        finally:
            for descriptor in frame.descriptors:
                os.close(descriptor)

    def _end_worker(self, lost: ContextLost) -> None:
        """End the worker. Without an answer the shim repeats the call in another one."""
        try:
            if lost.of_program:
                self._wire.send(FrameKind.FAILED, [FailureKind.OPERATOR, str(lost), {}])
        finally:
            self._reports.note(f"the GPU's context is lost: {lost}", self._trace)
            self._reports.lost()

    def _take_arena(self, frame: Frame) -> None:
        match frame.meta:
            case [int(size_bytes)] if len(frame.descriptors) == 1:
                arena = _map_arena(frame.descriptors[0], size_bytes)
            case _:
                raise CallRefused(FailureKind.BAD_FRAME, "ARENA is a size and one descriptor")
        self._state.take_arena(arena)
        self._share = self._executor.share(arena, self._share)
        self._wire.send(FrameKind.DONE, [])

    def _define(self, frame: Frame) -> None:
        match frame.meta:
            case [int(number), str(digest)]:
                self._state.define(number, self._programs.get(digest, frame.body))
            case _:
                raise CallRefused(FailureKind.BAD_FRAME, "DEFINE is a number and a digest")
        self._wire.send(FrameKind.DONE, [])

    def _bind(self, frame: Frame) -> None:
        match frame.meta:
            case [int(number), binding, described]:
                program = self._state.program(number)
                found = self._executor.bind(binding, described, program, self._state.kept)
                self._state.bind(number, found)
            case _:
                raise CallRefused(FailureKind.BAD_FRAME, "BIND is two numbers and a map")
        self._wire.send(FrameKind.DONE, [])

    def _drop(self, frame: Frame) -> None:
        if not isinstance(frame.meta, list) or not all(type(key) is int for key in frame.meta):
            raise CallRefused(FailureKind.BAD_FRAME, "DROP is a list of keys")
        self._executor.forget(self._state.kept, frame.meta)
        self._wire.send(FrameKind.DONE, [])

    def _call(self, frame: Frame) -> None:
        call = read_call(frame.meta, self._state)
        self._trace = call.options.trace
        self._leases.enter(call.lease, self._session)
        try:
            delivery = _Delivery(self._executor.device, self._state.arena)
            answer = self._executor.call(call, self._state, frame.body, delivery)
            self._send(answer, delivery)
            self._reports.ran(call.lease, answer)
        finally:
            self._leases.leave(call.lease)

    def _send(self, answer: CallAnswer, delivery: "_Delivery") -> None:
        result = answer.result
        meta = [result.storages, result.views, result.changed, answer.rng, answer.times]
        try:
            self._wire.send(FrameKind.RESULT, meta, delivery.body, delivery.descriptors)
        finally:
            for descriptor in delivery.descriptors:
                os.close(descriptor)


class _Delivery:
    """Puts a result's bytes into the arena where there is room, else behind the frame."""

    def __init__(self, device: WorkerDevice, arena: memoryview | None) -> None:
        self._device = device
        self._arena = arena
        self.body: Sequence[bytearray] = ()
        self.descriptors: list[int] = []

    def __call__(self, answer: CallAnswer) -> None:
        begun_s = time.perf_counter()
        sizes = answer.result.sizes()
        offsets, end = offsets_behind(answer.end_bytes, sizes)
        if self._arena is not None and end <= len(self._arena):
            answer.result.place(offsets)
            memory = self._arena
        else:
            answer.result.place([-1] * len(sizes))
            offsets, end = offsets_behind(0, sizes)
            memory = self._room(end)
        places = [memory[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
        self._device.send(answer.result.parts, places)
        answer.times[3] = time.perf_counter() - begun_s
        answer.times[1] += answer.times[3]

    def _room(self, size_bytes: int) -> memoryview:
        if self._arena is None:
            self.body = (bytearray(size_bytes),)
            return memoryview(self.body[0])
        descriptor = os.memfd_create("gpufaas-result", os.MFD_CLOEXEC)
        self.descriptors = [descriptor]
        os.ftruncate(descriptor, max(size_bytes, 1))
        return memoryview(mmap.mmap(descriptor, max(size_bytes, 1)))


def _lost_context(error: BaseException | None) -> ContextLost | None:
    """That the context is lost, be it that something else failed thereafter."""
    while error is not None and not isinstance(error, ContextLost):
        error = error.__context__
    return error


def _map_arena(descriptor: int, size_bytes: int) -> memoryview:
    """The shim's shared memory; one that could shrink under a call is refused."""
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
        if seals & _ARENA_SEALS != _ARENA_SEALS or os.fstat(descriptor).st_size != size_bytes:
            raise CallRefused(
                FailureKind.BAD_FRAME, "an arena is a sealed memfd of the size it names"
            )
        return memoryview(mmap.mmap(descriptor, size_bytes))
    except (OSError, ValueError, OverflowError) as error:
        raise CallRefused(FailureKind.BAD_FRAME, f"arena: {error}") from error
