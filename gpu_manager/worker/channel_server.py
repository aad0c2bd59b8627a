"""A data channel's loop: read a request, answer it, until the shim hangs up or talks nonsense."""

import fcntl
import hashlib
import mmap
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from gpu_manager.call_errors import CallRefused, ContextLost, OutOfMemory
from gpu_manager.devices.lent_memory import make_file
from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.worker_device import Unshare, WorkerDevice
from gpu_manager.worker.calls.call import CallAnswer, ChannelCall, Recording, read_call
from gpu_manager.worker.executor import Executor
from gpu_manager.worker.features import AnswerFrame, ChannelRecorder
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import NO_AREA, ChannelState, InputReader
from gpu_manager.worker.program.tensor_specs import bytes_of
from gpu_manager.worker.shared_memory import LEAST_FILE_BYTES, ResultFiles
from torch_shim.errors import BadFrame, ConnectionLost
from torch_shim.wire.messages import Call, CallAgain, CallOptions, CallResult, Done, Fetch
from torch_shim.wire.programs import unpack
from torch_shim.wire.protocol import (
    FailureKind,
    Frame,
    FrameKind,
    FrameSocket,
    pack_frame,
    places_behind,
)

_ARENA_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MOST_PROGRAMS = 1024
_LEAVE_S = 2.0  # for sending what only the worker has, when it ends
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

    def clear(self) -> None:
        with self._lock:
            self._built.clear()

    def _build(self, digest: str, packed: memoryview) -> BuiltProgram:
        try:
            return BuiltProgram(digest, unpack(packed), self._table)
        except (BadFrame, *_BUILD_ERRORS) as error:
            raise CallRefused(FailureKind.PROGRAM, str(error)[:500]) from error


class CallObservers(NamedTuple):
    """Callbacks of a channel for what the manager must learn."""

    ran: Callable[[int, str, CallAnswer], None]  # also whose, of a lease that is divided
    note: Callable[[str, str], None]  # and the trace that it is about, if that is known
    lost: Callable[[], object] = lambda: None  # the worker cannot use its GPU any more
    frames: Mapping[FrameKind, AnswerFrame] = {}  # that features answer
    recorder: Callable[[], ChannelRecorder] | None = None  # of calls that run again


# Where a result's bytes are put: the arena if there is room, else a file or the frame's body.


@dataclass(slots=True)
class Delivery:
    """Puts the bytes of one answer where the function reads them.

    With `files`, a large result goes to a file that the function gives back: `file_number`.
    """

    device: WorkerDevice
    arena: memoryview | None
    files: ResultFiles | None
    body: Sequence[bytearray] = ()
    descriptors: list[int] = field(default_factory=list)
    file_number: int = 0

    def __call__(self, answer: CallAnswer) -> None:
        """Copy a result's bytes, and say in the result where they lie."""
        begun_s = time.perf_counter()
        sizes = answer.result.sizes()
        offsets, end = places_behind(answer.end_bytes, sizes)
        if self.arena is not None and end <= len(self.arena):
            answer.result.place(offsets)
            memory = self.arena
        else:
            answer.result.place([-1] * len(sizes))
            offsets, end = places_behind(0, sizes)
            memory = self.room(end)
        places = [memory[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
        self.device.send(answer.result.parts, places)
        answer.times[3] = time.perf_counter() - begun_s
        answer.times[1] += answer.times[3]

    def room(self, size_bytes: int) -> memoryview:
        """Memory of at least this size that travels with the frame."""
        if self.arena is None:
            self.body = (bytearray(size_bytes),)
            return memoryview(self.body[0])
        if self.files is not None and size_bytes >= LEAST_FILE_BYTES:
            file = self.files.take(size_bytes, self.device.share)
            if file is not None:
                self.file_number = file.number
                self.descriptors = [os.dup(file.descriptor)]
                return file.memory
        descriptor = make_file(max(size_bytes, 1))
        self.descriptors = [descriptor]
        return memoryview(mmap.mmap(descriptor, max(size_bytes, 1)))


# Makes of a call, what it gave, and the number of its file what is sent.
ResultOf = Callable[[ChannelCall, CallAnswer, int], CallResult]

# What functions send to workers.
_REQUESTS = frozenset(kind for kind in FrameKind if FrameKind.ARENA <= kind < FrameKind.DONE)


class ChannelServer:
    """Serves one channel of one session on its own thread."""

    def __init__(
        self,
        connection: socket.socket,
        session: str,
        function: str,
        executor: Executor,
        programs: Programs,
        reports: CallObservers,
    ) -> None:
        self._wire = FrameSocket(connection, eager=True)
        self._session = session
        self._function = function
        self._executor = executor
        self._programs = programs
        self._reports = reports
        self._state = ChannelState(executor.sessions.open(session))
        self._unshare: Unshare | None = None  # of the arena
        # The last recorded call's frame: the same one again need not be read.
        self._usual: tuple[bytes, Frame] | None = None
        self._last: CallOptions | Recording = CallOptions()  # of the calls: has its trace
        self._handlers: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.ARENA: self._take_arena,
            FrameKind.DEFINE: self._define,
            FrameKind.BIND: self._bind,
            FrameKind.CALL: self._call,
            FrameKind.DROP: self._drop,
            FrameKind.FETCH: self._fetch,
            FrameKind.SHARE: self._share_block,
        }
        for kind, answer in reports.frames.items():
            self._handlers[kind] = partial(self._done_by, answer)
        self._recorder: ChannelRecorder | None = None
        if reports.recorder is not None:
            self._recorder = reports.recorder()
            self._handlers[FrameKind.RUN_AGAIN] = partial(self._run_again, self._recorder)
            self._handlers[FrameKind.CALL_AGAIN] = partial(self._call_again, self._recorder)
        self._ending = False

    def serve(self) -> None:
        """Answer requests in order until the channel ends."""
        torch.set_grad_enabled(False)
        try:
            while True:
                if self._usual is None:
                    self._answer(self._wire.receive())
                else:
                    packed, frame = self._usual
                    self._answer(self._wire.receive_unless(packed) or frame)
        except ConnectionLost:
            pass
        except (BadFrame, MemoryError) as error:
            text = f"channel of session {self._session} closed: {error}"
            self._reports.note(text, self._last.trace)
        finally:
            self.close()

    def end(self) -> None:
        """Read no further request, since the worker ends; on another thread than `serve`."""
        self._ending = True
        with suppress(OSError):  # the shim has hung up already
            self._wire.socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Let go of everything; nobody serves the channel any more."""
        last = self._executor.sessions.close(self._session)
        if last and self._ending:
            self._leave()
        self._wire.close()
        if last:
            with self._executor.gate:
                self._state.kept.clear()
        self._state.close()
        self._share(NO_AREA)
        if self._recorder is not None:
            self._recorder.clear()
        self._last = CallOptions()
        self._handlers.clear()  # they hold this object: nothing should wait for the collector

    def _answer(self, frame: Frame) -> None:
        handler = self._handlers.get(frame.kind)
        if handler is None:
            frame.close_descriptors()
            if frame.kind in _REQUESTS:  # of a feature that the worker does not have
                detail = f"nothing here answers {frame.kind.name}"
                self._wire.send(FrameKind.FAILED, [FailureKind.BAD_FRAME, detail, {}])
                return
            raise BadFrame(f"{frame.kind.name} on a data channel")
        try:
            handler(frame)
        except CallRefused as refused:
            self._wire.send(FrameKind.FAILED, [refused.failure, refused.detail, refused.facts])
        except OutOfMemory as short:  # of a request that no room is made for
            self._wire.send(FrameKind.FAILED, [FailureKind.OUT_OF_MEMORY, str(short)[:500], {}])
        except BadFrame as error:
            self._wire.send(FrameKind.FAILED, [FailureKind.BAD_FRAME, str(error), {}])
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
            self._reports.note(f"the GPU's context is lost: {lost}", self._last.trace)
            self._reports.lost()

    def _take_arena(self, frame: Frame) -> None:
        (size_bytes,) = frame.meta
        arena = _map_arena(frame, size_bytes)
        self._state.take_arena(arena)
        if self._recorder is not None:
            self._recorder.clear()
        self._share(arena)
        self._done()

    def _share(self, area: memoryview) -> None:
        """Prepare it instead of the former arena; not during a call, which may be recorded."""
        with self._executor.gate:
            if self._unshare is not None:
                self._unshare()
            self._unshare = self._executor.device.share(area) if len(area) else None

    def _share_block(self, frame: Frame) -> None:
        key, size_bytes = frame.meta
        block = _map_arena(frame, size_bytes)
        with self._executor.gate:
            self._state.kept.blocks.add(key, block, self._executor.device.share)
        self._done()

    def _define(self, frame: Frame) -> None:
        number, digest = frame.meta
        self._state.define(number, self._programs.get(digest, frame.body))
        self._done()

    def _bind(self, frame: Frame) -> None:
        number, binding, tensors = frame.meta
        program, executor = self._state.program(number), self._executor
        with executor.gate:
            reader = InputReader(executor.device, executor.images, self._state.kept)
            found = reader.binding(binding, tensors, program.inputs)
        self._state.bind(number, found)
        self._done()

    def _drop(self, frame: Frame) -> None:
        self._executor.forget(self._state.kept, frame.meta)
        self._done()

    def _fetch(self, frame: Frame) -> None:
        asked: Fetch = frame.meta
        with self._delivery(gives_back=asked.gives_back) as delivery:
            with self._executor.gate:
                size = self._deliver_kept(asked, delivery)
            self._send(FrameKind.DONE, Done(size, delivery.file_number), delivery)

    def _deliver_kept(self, asked: Fetch, delivery: Delivery) -> int:
        """Copy a kept storage, which the function has too from now on; return its size."""
        held = self._state.kept.held(asked.key, asked.epoch)
        size = held.storage.nbytes()
        room = delivery.room(size)[:size]
        self._executor.device.send([bytes_of(held.storage, 0, size)], [room])
        self._state.kept.shared(asked.key)
        return size

    def _done(self, answer: Done = Done()) -> None:  # noqa: B008 - it never changes
        self._wire.send(FrameKind.DONE, answer)

    def _done_by(self, answer: AnswerFrame, frame: Frame) -> None:
        self._done(answer(self._session, self._state.kept, frame))

    def _leave(self) -> None:
        """Send the function what only this worker has, since the worker ends."""
        sole = self._state.kept.sole()
        sizes = [held.storage.nbytes() for held in sole]
        offsets, end = places_behind(0, sizes)
        if not sole:
            return
        parts = [bytes_of(held.storage, 0, size) for held, size in zip(sole, sizes, strict=True)]
        left = [
            [held.key, held.epoch, offset, size]
            for held, offset, size in zip(sole, offsets, sizes, strict=True)
        ]
        with self._delivery() as delivery:
            room = delivery.room(end)
            places = [room[start : start + size] for _, _, start, size in left]
            self._executor.device.send(parts, places, TransferRank.BACKGROUND)
            self._wire.socket.settimeout(_LEAVE_S)
            with suppress(ConnectionLost):  # the function has gone too, or does not read
                self._send(FrameKind.LEFT, left, delivery)

    def _call(self, frame: Frame) -> None:
        call: Call = frame.meta
        record, recorder = call.options.record, self._recorder

        def result(asked: ChannelCall, answer: CallAnswer, file_number: int) -> CallResult:
            recorded = None
            if record is not None and recorder is not None:
                recorded = recorder.keep(record, asked, answer)
            return answer.sent(file_number, recorded)

        self._answer_call(call, frame.body, result)

    def _call_again(self, recorder: ChannelRecorder, frame: Frame) -> None:
        again: CallAgain = frame.meta

        def result(_: ChannelCall, answer: CallAnswer, file_number: int) -> CallResult:
            return recorder.answered(again.number, answer.sent(file_number))

        self._answer_call(recorder.again(again), NO_AREA, result)

    def _answer_call(self, call: Call, body: memoryview, result: ResultOf) -> None:
        with self._delivery(gives_back=call.options.residents is not None) as delivery:
            asked = read_call(call, self._state, body, delivery)
            self._last = call.options

            def send(answer: CallAnswer) -> None:
                sent = result(asked, answer, delivery.file_number)
                self._send(FrameKind.RESULT, sent, delivery)

            self._run(asked, send)

    def _run_again(self, recorder: ChannelRecorder, frame: Frame) -> None:
        asked = recorder.find(*frame.meta)
        assert asked.recorded is not None, "recorders give recorded calls"
        self._last = asked.recorded
        if self._usual is None or frame is not self._usual[1]:
            self._usual = pack_frame(frame.kind, frame.meta), frame
        packed = asked.recorded.answer
        self._run(asked, lambda _: self._wire.send_packed(packed))

    def _run(self, asked: ChannelCall, send: Callable[[CallAnswer], None]) -> None:
        """Run a call under its lease, and send its answer before anybody counts it."""
        leases = self._executor.leases
        lease = leases.enter(asked.lease, self._session, self._function)
        try:
            if lease.admission.terms is not asked.terms:
                asked = asked._replace(terms=lease.admission.terms)
            answer = self._executor.call(asked)
            send(answer)
            session = self._session if lease.admission.divided else ""
            self._reports.ran(asked.lease, session, answer)
        finally:
            leases.leave(asked.lease)

    @contextmanager
    def _delivery(self, *, gives_back: bool = False) -> Iterator[Delivery]:
        """The delivery of one answer; its file is free again if the answer is not sent."""
        kept = self._state.kept
        files = kept.files if gives_back else None
        delivery = Delivery(self._executor.device, self._state.arena, files)
        try:
            yield delivery
        except BaseException:
            if delivery.file_number:
                self._executor.forget(kept, [-delivery.file_number])
            raise
        finally:
            for descriptor in delivery.descriptors:
                os.close(descriptor)

    def _send(self, kind: FrameKind, meta: Any, delivery: Delivery) -> None:
        self._wire.send(kind, meta, delivery.body, delivery.descriptors)


def _lost_context(error: BaseException | None) -> ContextLost | None:
    """Return the ContextLost behind this error, even if a later error hides it."""
    while error is not None and not isinstance(error, ContextLost):
        error = error.__context__
    return error


def one_descriptor(frame: Frame) -> int:
    if len(frame.descriptors) != 1:
        raise BadFrame(f"{frame.kind.name} comes with one descriptor")
    return frame.descriptors[0]


def _map_arena(frame: Frame, size_bytes: int) -> memoryview:
    """The shim's shared memory; one that could shrink under a call is refused."""
    descriptor = one_descriptor(frame)
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if seals & _ARENA_SEALS != _ARENA_SEALS or os.fstat(descriptor).st_size != size_bytes:
            raise CallRefused(
                FailureKind.BAD_FRAME, "an arena is a sealed memfd of the size it names"
            )
        return memoryview(mmap.mmap(descriptor, size_bytes))
    except (OSError, ValueError, OverflowError) as error:
        raise CallRefused(FailureKind.BAD_FRAME, f"arena: {error}") from error
