"""One call: inputs in, the program run under its lease and within its memory, results described."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from gpu_manager.worker.call_errors import CallRefused, OutOfMemory
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.calls.data_in_worker import DataInWorker
from gpu_manager.worker.calls.graph_call import GraphCall
from gpu_manager.worker.calls.results import PackedResult, Packer
from gpu_manager.worker.device.device_image import DeviceImage
from gpu_manager.worker.device.worker_device import SharedArea, WorkerDevice
from gpu_manager.worker.lending.lent_memory import IDLE_S
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.channel_state import (
    Binding,
    ChannelState,
    KeptStorages,
    SessionStorages,
    TensorInput,
)
from gpu_manager.worker.program.inputs import InputReader, Inputs
from gpu_manager.worker.program.recorded_runs import Graphs, ProgramRun
from gpu_manager.worker.program.tensor_specs import bytes_of
from torch_shim.wire.protocol import FailureKind

# What a program can raise that is its own doing: a wrong argument, a failed assertion of torch.
OPERATOR_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    NotImplementedError,
    AssertionError,
    NameError,
)
Found = TypeVar("Found")
_MOST_SHAPES = 4096  # whose memory need is remembered

# Copies a result's bytes to where the shim will read them.
Deliver = Callable[["CallAnswer"], None]
# Asks the manager for more memory: lease and need in bytes; the new limit (None: it stays as it
# is) and whether to go on.
AskRelief = Callable[[int, int], tuple[int | None, bool]]


class CallAnswer(NamedTuple):
    """What a call gave: the result, the generator's state, times, and numbers for the manager.

    The times are seconds: waiting for the GPU, transfer, compute, and of the transfer that back.
    """

    result: PackedResult
    end_bytes: int
    rng: bytes | None
    times: list[float]
    batch: int


class Executor:
    """Runs the calls of one model, one at a time, and keeps what they have in common."""

    def __init__(
        self,
        device: WorkerDevice,
        table: OperatorTable,
        leases: AdmittedLeases,
        ask_relief: AskRelief,
        together: CallsTogether,
    ) -> None:
        """`together` is the process's: it lets in the calls of all models, and has their data."""
        self.device = device
        self.images: dict[str, DeviceImage] = {}
        self.sessions = SessionStorages()
        self.limit_bytes = 0
        self.peak_bytes = 0
        self.run_s = 0.0  # that a call takes at least, on an emulated GPU
        self._table = table
        self._leases = leases
        self._ask_relief = ask_relief
        self._together = together
        self._gate = threading.Lock()
        self.data = DataInWorker(device, self._gate, together.published)
        self.graphs = Graphs(device)
        self._needs: dict[tuple[Any, ...], int] = {}
        self._trimming: threading.Timer | None = None
        self._more_held = False  # perhaps more than the limit, since this was last looked at

    def set_limit(self, limit_bytes: int) -> None:
        """Use no more than this from the next call on."""
        self.limit_bytes = limit_bytes
        self.device.limit(limit_bytes)
        self._more_held = True
        self._keep_within_limit()

    def _keep_within_limit(self) -> None:
        """Give back what is kept for later calls only, the recordings last.

        Not during a call, which does it at its end: it may be waiting for this very limit.
        """
        if not (
            self.device.keeps_memory and self._more_held and self._gate.acquire(blocking=False)
        ):
            return
        try:
            self._more_held = False
            if self.device.used_bytes() > self.limit_bytes:
                self.device.release()
            if self.device.used_bytes() > self.limit_bytes:
                self.graphs.clear()
                self._park()
        finally:
            self._gate.release()

    def share(self, area: memoryview, former: SharedArea | None) -> SharedArea | None:
        """Prepare an area instead of the former one; not during a call, which may be recorded."""
        with self._gate:
            if former is not None:
                former.close()
            return self.device.share(area) if len(area) else None

    def share_block(self, kept: KeptStorages, key: int, memory: memoryview) -> None:
        """Prepare a block of a function's memory, so that calls may name it."""
        with self._gate:
            kept.blocks.add(key, memory, self.device.share)

    def bind(
        self, number: Any, described: Any, program: BuiltProgram, kept: KeptStorages
    ) -> Binding:
        """Make a binding of inputs that are here already."""
        with self._gate:
            reader = InputReader(self.device, self.images, kept)
            return reader.binding(number, described, program.inputs)

    def forget(self, kept: KeptStorages, keys: list[int]) -> None:
        """Let kept storages go."""
        with self._gate:
            kept.drop(keys)
        self._give_up_idle_files()

    def forget_session(self, kept: KeptStorages) -> None:
        """Let everything go that a session keeps, its files too."""
        with self._gate:
            kept.clear()

    def _give_up_idle_files(self) -> None:
        """Have the files that no function reads be given up, unless they are used again soon."""
        if self._trimming is None and self.sessions.any_free_file():
            later = threading.Timer(IDLE_S, self._trim_files)
            later.daemon = True
            with contextlib.suppress(RuntimeError):  # no room for a thread: the next call tries
                later.start()
                self._trimming = later

    def _trim_files(self) -> None:
        with self._gate:
            self._trimming = None
            self.sessions.trim_files(time.monotonic() - IDLE_S)
        self._give_up_idle_files()

    def fetch(
        self, kept: KeptStorages, key: int, epoch: int, room: Callable[[int], memoryview]
    ) -> int:
        """Copy a kept storage to memory of its size, which `room` gives; return the size."""
        with self._gate:
            held = kept.find(key, epoch)
            if held is None:
                raise CallRefused(FailureKind.MISSING, f"key {key}", {"missing": [key]})
            size = held.storage.nbytes()
            self.device.send([bytes_of(held.storage, 0, size)], [room(size)[:size]])
            kept.shared(key)
            return size

    def call(
        self, call: GraphCall, channel: ChannelState, body: memoryview, deliver: Deliver
    ) -> CallAnswer:
        """Run a call; Refused where it cannot be answered.

        `deliver` copies the result's bytes to where they go, before any other call runs that
        could write to them.
        """
        try:
            return self._call_in_turn(call, channel, body, deliver)
        finally:
            self._keep_within_limit()
            self.device.after_call()
            self._give_up_idle_files()

    def _call_in_turn(
        self, call: GraphCall, channel: ChannelState, body: memoryview, deliver: Deliver
    ) -> CallAnswer:
        asked_s = time.perf_counter()
        with self._gate, self._together.call(call.needs):
            self._leases.check(call.lease)
            if call.options.residents is not None:
                channel.kept.drop(call.options.residents.dropped)
            begun_s = time.perf_counter()
            try:
                inputs = self._perhaps_alone(call, lambda: self._inputs(call, channel, body))
            except OutOfMemory as short:
                self._make_room(call, short)
                inputs = self._perhaps_alone(call, lambda: self._inputs(call, channel, body))
            times = [begun_s - asked_s, time.perf_counter() - begun_s, 0.0, 0.0]
            return self._answer(call, inputs, channel, times, deliver)

    def _inputs(self, call: GraphCall, channel: ChannelState, body: memoryview) -> Inputs:
        prepared: Inputs | None = channel.prepared(call.number, call.inputs, call.binding)
        area = body if channel.arena is None else channel.arena
        if prepared is not None:
            return prepared.refilled(area)
        how = {"borrows": call.program.borrows, "reads_only": call.program.reads_only}
        reader = InputReader(self.device, self.images, channel.kept, area, **how)
        inputs = reader.call(call.inputs, call.program.inputs, call.binding)
        if inputs.refill is not None and channel.arena is not None:
            channel.prepare(call.number, call.inputs, call.binding, inputs)
        return inputs

    def _answer(
        self,
        call: GraphCall,
        inputs: Inputs,
        channel: ChannelState,
        times: list[float],
        deliver: Deliver,
    ) -> CallAnswer:
        """Run the program and deliver what it gave, leaving images and constants as they were."""
        program = call.program
        constants = program.constants
        before = _versions(constants)
        changed: list[TensorInput] | None = None
        try:
            begun_s = time.perf_counter()
            run = self._run_within_limit(call, inputs)
            written = inputs.changed()
            if not all(entry.keeps_its_shape() for entry in written):
                raise CallRefused(FailureKind.OPERATOR, "an input got another shape in place")
            rng = call.options.rng
            rng = None if rng is None else self.device.seeded(rng)
            spent_s = time.perf_counter() - begun_s
            if self.run_s > spent_s:  # sleep(0) would give the core away
                time.sleep(self.run_s - spent_s)
            times[2] = max(spent_s, self.run_s)
            packer = Packer(
                [*inputs.positions, run.positions],
                constants,
                channel.kept,
                call.options.keys,
                call.options.residents,
            )
            result = packer.pack(run.outputs, written, lasting=run.lasting)
            answer = CallAnswer(result, inputs.end_bytes, rng, times, inputs.batch)
            deliver(answer)
            changed = written
            return answer
        finally:
            self._table.reset()
            if constants and _versions(constants) != before:
                program.constants = program.fresh_constants()
            if changed is None:
                channel.forget_prepared(call.number)
                self._settle(inputs.changed(), call, channel.kept, finished=False)
            elif changed:
                self._settle(changed, call, channel.kept, finished=True)

    def _run_within_limit(self, call: GraphCall, inputs: Inputs) -> ProgramRun:
        """The program's outputs, after room was made if it was short; once."""
        shapes = (call.program.digest, *inputs.shapes)
        attempt = partial(self._attempt, call, inputs, shapes)
        try:
            run, need_bytes = self._perhaps_alone(call, attempt, inputs)
        except OutOfMemory as short:
            self._make_room(call, short)
            inputs.refuse_if_written()
            return self._second_attempt(lambda: self._perhaps_alone(call, attempt, inputs))
        if need_bytes > self.limit_bytes:
            self.device.release()
            self._relieve(call, OutOfMemory(need_bytes, "measured"))
        return run

    def _perhaps_alone(
        self, call: GraphCall, work: Callable[[], Found], inputs: Inputs | None = None
    ) -> Found:
        """Do it; once more without calls of other models if those have the memory that it needs."""
        try:
            return work()
        except OutOfMemory as short:
            if not short.by_others:
                raise
        if inputs is not None:
            inputs.refuse_if_written()
        self._together.become_alone(call.needs)
        self.device.release_beside()
        return work()

    def _second_attempt(self, attempt: Callable[[], tuple[ProgramRun, int]]) -> ProgramRun:
        try:
            run, need_bytes = attempt()
        except OutOfMemory as short:
            raise self._too_much(short.need_bytes) from short
        if need_bytes > self.limit_bytes:
            raise self._too_much(need_bytes)
        return run

    def _attempt(
        self, call: GraphCall, inputs: Inputs, shapes: tuple[Any, ...]
    ) -> tuple[ProgramRun, int]:
        """Run it, measured if such a call was not measured before; what it gave and needs."""
        known = self._needs.get(shapes)
        if known is not None and known > self.limit_bytes:
            raise OutOfMemory(known, "as it took before")
        options = call.options
        if options.rng is not None:
            self._seed(options.rng)
        recorded = self.graphs.recorded
        try:
            run, need_bytes = self.device.run(
                lambda: self.graphs.run(call.program, call.binding, inputs, options.mode()),
                measure=known is None,
            )
        except OPERATOR_ERRORS as error:
            detail = f"{type(error).__name__}: {error}"
            raise CallRefused(FailureKind.OPERATOR, detail[:2000]) from error
        if known is None or self.graphs.recorded != recorded:
            self._note_memory(need_bytes)
        if known is None and len(self._needs) < _MOST_SHAPES:
            self._needs[shapes] = need_bytes
        return run, need_bytes

    def _note_memory(self, need_bytes: int) -> None:
        """Remember what a call took; what stays allocated afterwards is no other model's either."""
        held_bytes = self.device.used_bytes() if self.device.keeps_memory else 0
        self.peak_bytes = max(self.peak_bytes, need_bytes, held_bytes)
        self._more_held = True

    def _seed(self, state: bytes) -> None:
        try:
            self.device.seed(state)
        except (RuntimeError, TypeError) as error:
            raise CallRefused(FailureKind.BAD_FRAME, f"generator's state: {error}") from error

    def _make_room(self, call: GraphCall, short: OutOfMemory) -> None:
        """Give back everything that is kept for later, and ask for more."""
        self.sessions.clear_copies()
        self.graphs.clear()
        self._park()
        self._relieve(call, short)

    def _park(self) -> None:
        """Move what no function has to host memory, until a call needs it again."""
        for held in self.sessions.sole():
            if not held.parked:
                held.storage, held.parked = self.device.park(held.storage), True
        self.data.park()
        self.device.release()

    def _relieve(self, call: GraphCall, short: OutOfMemory) -> None:
        with self._together.yielded(call.needs):  # their calls may end what has to leave
            limit_bytes, retry = self._ask_relief(call.lease, short.need_bytes)
        if limit_bytes is not None:
            self.set_limit(limit_bytes)
        if not retry:
            raise self._too_much(short.need_bytes) from short

    def _too_much(self, need_bytes: int) -> CallRefused:
        detail = f"the call needs {need_bytes} bytes, {self.limit_bytes} are to be had"
        facts = {"need_bytes": need_bytes, "limit_bytes": self.limit_bytes}
        return CallRefused(FailureKind.OUT_OF_MEMORY, detail, facts)

    def _settle(
        self, changed: list[TensorInput], call: GraphCall, kept: KeptStorages, *, finished: bool
    ) -> None:
        """After a program wrote to inputs: images are restored, kept storages have a new epoch.

        A call that failed half-way leaves kept storages in no state that the shim knows of.
        """
        for held in {id(entry.held): entry.held for entry in changed}.values():
            if held.image is not None:
                held.image.restore(*held.place)
                if call.binding is not None:
                    call.binding.gone = True
            elif held.key and finished:
                held.epoch += 1
            elif held.key:
                kept.drop([held.key])
                if call.binding is not None and call.binding.keeps(held.key):
                    call.binding.gone = True


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - the counter autograd goes by
