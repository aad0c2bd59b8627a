"""The calls of one model, one at a time: inputs in, the program run, its result delivered."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from gpu_manager.call_errors import CallRefused, OutOfMemory, ShareRefused
from gpu_manager.devices.lent_memory import IDLE_S, IdleTimer
from gpu_manager.devices.worker_device import DeviceImage, WorkerDevice
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.call import CallAnswer, ChannelCall, Computing, Packer
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.orders import LeaseTerms
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import (
    InputReader,
    Inputs,
    KeptStorages,
    SessionStorages,
    TensorInput,
)
from gpu_manager.worker.program.recorded_runs import Graphs, ProgramRun
from gpu_manager.worker.program.tensor_specs import versions_of
from gpu_manager.worker.program.usage import ModelUsage
from torch_shim.wire.protocol import FailureKind

# Looks at what a run gave before it is delivered, and at whether it wrote to inputs or constants.
Look = Callable[[Inputs, ProgramRun, bool], None]
# Calls a function with some arguments when a call has the turn of its slots, model and process.
InTurn = Callable[..., CallAnswer]
# Answers a call when it has its turn, or has another call's turn answer it.
RunCall = Callable[[ChannelCall, InTurn], CallAnswer]

Found = TypeVar("Found")
_MOST_SHAPES = 4096  # whose memory need is remembered

# What a program can raise that is its own doing: a wrong argument, a failed assertion of torch.
OPERATOR_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    NameError,
)

# Asks the manager for more memory: lease and need in bytes; the new limit (None: it stays as it
# is) and whether to go on.
AskRelief = Callable[[int, int], tuple[int | None, bool]]


class Executor:
    """Runs the calls of one model, each for whoever has the model's turn."""

    def __init__(
        self,
        device: WorkerDevice,
        leases: AdmittedLeases,
        ask_relief: AskRelief,
        together: CallsTogether,
    ) -> None:
        """`together` is the process's: it lets in the calls of all models."""
        self.device = device
        self.leases = leases
        self.images: dict[str, DeviceImage] = {}
        self.gate = threading.Lock()  # held while a call of the model runs
        self.memory = ModelMemory(device, self.gate, ask_relief, together)
        self.sessions = self.memory.sessions
        self.usage = ModelUsage(emulated=device.device.type == "cpu")
        self.run_s = 0.0  # that a call takes at least, on an emulated GPU, with all its share
        self.share = 1.0  # of the GPU that the model has at most
        self._slowed = 1.0  # times as long as that on the slots of the lease
        self._defers = False  # emulated time passes after the call, while others of the model run
        self._owed_s = 0.0
        self._together = together
        self._run: RunCall = self._run_singly
        self._trimming = IdleTimer(IDLE_S, self._trim_files)

    def extend(self, park: Callable[[], None], run: RunCall | None) -> None:
        """Have a feature park what it has where memory is short, and run the calls, if it does.

        There was no call yet.
        """
        self.memory.parks.append(park)
        if run is not None:
            self._run = run

    def forget(self, kept: KeptStorages, keys: list[int]) -> None:
        with self.gate:
            kept.drop(keys)
        self._give_up_idle_files()

    def call(self, asked: ChannelCall) -> CallAnswer:
        """Run a call; CallRefused where it cannot be answered."""
        try:
            return self._run(asked, self._in_turn)
        finally:
            self.memory.keep_within_limit()
            self.device.after_call()
            self._give_up_idle_files()

    @property
    def least_s(self) -> float:
        """What a run takes at least on the lease's slots, on an emulated GPU."""
        return self.run_s * self._slowed

    def run(self, asked: ChannelCall, asked_s: float, look: Look | None = None) -> CallAnswer:
        """Run a call and deliver its result; CallRefused where it cannot be answered."""
        if asked.recorded is not None and look is None:
            answer = asked.recorded.run(self, asked, asked_s)
            if answer is not None:
                return answer
        self.admit(asked)
        begun_s = time.perf_counter()
        inputs = self.memory.with_room(asked, lambda: self.inputs(asked))
        times = [begun_s - asked_s, time.perf_counter() - begun_s, 0.0, 0.0]
        return self.answer(asked, inputs, times, look)

    def admit(self, asked: ChannelCall) -> None:
        """Refuse it unless its lease is in force; forget what the function needs no more."""
        self.leases.in_force(asked.lease)
        residents = asked.options.residents
        if residents is not None:
            asked.channel.kept.drop(residents.dropped)

    def inputs(self, asked: ChannelCall) -> Inputs:
        channel, program = asked.channel, asked.program
        named = asked.number, asked.inputs, asked.binding
        prepared: Inputs | None = channel.prepared(*named)
        area = asked.body if channel.arena is None else channel.arena
        if prepared is not None:
            return prepared.refilled(area)
        how = {"borrows": program.borrows, "reads_only": program.reads_only}
        reader = InputReader(self.device, self.images, channel.kept, area, **how)
        inputs = reader.call(asked.inputs, program.inputs, asked.binding)
        if inputs.refill is not None and channel.arena is not None:
            channel.prepare(*named, inputs)
        return inputs

    def answer(
        self, asked: ChannelCall, inputs: Inputs, times: list[float], look: Look | None = None
    ) -> CallAnswer:
        """Run the program and deliver what it gave, leaving images and constants as they were."""
        program = asked.program
        before = versions_of(program.constants)
        changed: list[TensorInput] | None = None
        try:
            begun, begun_s = self.usage.begin(), time.perf_counter()
            run = self._run_within_limit(asked, inputs)
            written = inputs.changed()
            refuse_reshaped(written)
            rng = asked.options.rng
            rng = None if rng is None else self.device.seeded(rng)
            spent_s = time.perf_counter() - begun_s
            times[2] = self.emulated_s(spent_s)
            moved = inputs.received_bytes, _sum_of_bytes(run.outputs)
            self.usage.ran(begun, program.counts, (spent_s, times[2]), moved)
            if look is not None:
                look(inputs, run, bool(written) or versions_of(program.constants) != before)
            answer = self.delivered(asked, inputs, run, written, times, rng)
            changed = written
            return answer
        finally:
            self.tidy(program, before)
            self.settle_all(asked, inputs, changed)

    def delivered(
        self,
        asked: ChannelCall,
        inputs: Inputs,
        run: ProgramRun,
        written: list[TensorInput],
        times: list[float],
        rng: bytes | None = None,
        together: int = 1,
    ) -> CallAnswer:
        """Describe what a program gave, and copy it to where the function reads it."""
        if asked.recorded is not None:
            result = asked.recorded.deliver(run.outputs, written, times)
        else:
            packer = Packer(asked, [*inputs.positions, run.positions], lasting=run.lasting)
            result = packer.pack(run.outputs, written)
        answer = CallAnswer(result, inputs.end_bytes, rng, times, inputs.batch, together)
        asked.deliver(answer)
        return answer

    def emulated_s(self, spent_s: float) -> float:
        """On an emulated GPU, wait until the run has taken its time; how long it took."""
        least_s = self.least_s
        if least_s > spent_s:  # sleep(0) would give the core away
            if self._defers:
                self._owed_s += least_s - spent_s
            else:
                time.sleep(least_s - spent_s)
        return max(spent_s, least_s)

    def tidy(self, program: BuiltProgram, before: list[int]) -> None:
        if program.constants and versions_of(program.constants) != before:
            program.constants = program.fresh_constants()

    def settle_all(
        self, asked: ChannelCall, inputs: Inputs, changed: list[TensorInput] | None
    ) -> None:
        """After a call: what it wrote to is `changed`; None for a call that failed."""
        if changed is None:
            asked.channel.forget_prepared(asked.number)
            self.settle(inputs.changed(), asked, finished=False)
        elif changed:
            self.settle(changed, asked, finished=True)

    def settle(self, changed: list[TensorInput], asked: ChannelCall, *, finished: bool) -> None:
        """After a program wrote to inputs: images are restored, kept storages have a new epoch.

        A call that failed half-way leaves kept storages in no state that the shim knows of.
        """
        binding, kept = asked.binding, asked.channel.kept
        for held in {id(entry.held): entry.held for entry in changed}.values():
            if held.image is not None:
                held.image.restore(*held.place)
                if binding is not None:
                    binding.gone = True
            elif held.key and finished:
                held.epoch += 1
            elif held.key:
                kept.drop([held.key])
                if binding is not None and binding.keeps(held.key):
                    binding.gone = True

    def _run_singly(self, asked: ChannelCall, in_turn: InTurn) -> CallAnswer:
        return in_turn(asked, self.run, asked, time.perf_counter())

    def _in_turn(
        self, asked: ChannelCall, work: Callable[..., CallAnswer], *arguments: Any
    ) -> CallAnswer:
        """Do the work of a call, or of several, when its slots, its model and its process are free.

        What emulated slots take beyond the computing passes while the model's calls on other slots
        compute.
        """
        with self._together.slots.turn(asked.terms.slots):
            with self.gate, self._together.call(asked.needs):
                self._use_terms(asked.terms)
                answer = work(*arguments)
                owed_s = self._owed_s
            if owed_s:
                time.sleep(owed_s)
            return answer

    def _use_terms(self, terms: LeaseTerms) -> None:
        """Compute on a lease's slots from now on: with fewer of them it takes longer in proportion.

        Of an emulated GPU, which has no other speed than its host's.
        """
        share = min(self.share, terms.share)
        self._slowed, self._defers, self._owed_s = self.share / share, bool(terms.slots), 0.0
        try:
            self.device.serve(share, terms.vcpus)
        except ShareRefused as refused:
            raise CallRefused(FailureKind.OPERATOR, str(refused)) from refused

    def _run_within_limit(self, asked: ChannelCall, inputs: Inputs) -> ProgramRun:
        shapes = shapes_of(asked.program, inputs)
        mode, rng = asked.mode, asked.options.rng

        def seeded() -> ProgramRun:
            if rng is not None:
                self._seed(rng)
            with Computing(self.device.device, mode):
                return self.memory.graphs.run(asked.program, asked.binding, inputs, mode)

        return self.memory.run(asked, inputs, shapes, seeded)

    def _seed(self, state: bytes) -> None:
        try:
            self.device.seed(state)
        except (RuntimeError, TypeError) as error:
            raise CallRefused(FailureKind.BAD_FRAME, f"generator's state: {error}") from error

    def _give_up_idle_files(self) -> None:
        """Have the files that no function reads be given up, unless they are used again soon."""
        if not self._trimming.is_due and self.sessions.any_free_file():
            self._trimming.ask()

    def _trim_files(self) -> None:
        with self.gate:
            self.sessions.trim_files(time.monotonic() - IDLE_S)
        self._give_up_idle_files()


def shapes_of(program: BuiltProgram, inputs: Inputs) -> tuple[Any, ...]:
    """Equal for calls that take the same memory."""
    return program.digest, *inputs.shapes


def refuse_reshaped(written: Sequence[TensorInput]) -> None:
    """CallRefused where an input that a program wrote to got another shape by that."""
    if not all(entry.keeps_its_shape() for entry in written):
        raise CallRefused(FailureKind.OPERATOR, "an input got another shape in place")


def _sum_of_bytes(outputs: Sequence[Any]) -> int:
    return sum(each.nbytes for each in outputs if isinstance(each, torch.Tensor))


class ModelMemory:
    """The limit of one model, what its calls took, and what keeps them within it."""

    def __init__(
        self,
        device: WorkerDevice,
        gate: threading.Lock,
        ask_relief: AskRelief,
        together: CallsTogether,
    ) -> None:
        """`gate` is held by whoever uses the model's memory."""
        self.sessions = SessionStorages()
        self.graphs = Graphs(device)
        self.limit_bytes = 0
        self.peak_bytes = 0
        self._device = device
        self.parks: list[Callable[[], None]] = []  # move to host memory what features have
        self._gate = gate
        self._ask_relief = ask_relief
        self._together = together
        self._needs: dict[tuple[Any, ...], int] = {}
        self._more_held = False  # perhaps more than the limit, since this was last looked at

    def set_limit(self, limit_bytes: int) -> None:
        """Use no more than this from the next call on."""
        self.limit_bytes = limit_bytes
        self._device.limit(limit_bytes)
        self._more_held = True
        self.keep_within_limit()

    def keep_within_limit(self) -> None:
        """Give back what is kept for later calls only, the recordings last.

        Not during a call, which does it at its end: it may be waiting for this very limit.
        """
        if not (
            self._device.keeps_memory and self._more_held and self._gate.acquire(blocking=False)
        ):
            return
        try:
            self._more_held = False
            if self._device.used_bytes() > self.limit_bytes:
                self._device.release()
            if self._device.used_bytes() > self.limit_bytes:
                self.graphs.clear()
                self.park()
        finally:
            self._gate.release()

    def is_enough(self, shapes: tuple[Any, ...]) -> bool:
        """Whether such calls are known to do with the limit."""
        known_bytes = self._needs.get(shapes)
        return known_bytes is not None and known_bytes <= self.limit_bytes

    def attempt(self, shapes: tuple[Any, ...], work: Callable[[], Found]) -> tuple[Found, int]:
        """Work on the GPU, measured if such work was not measured before; what it gave and needs.

        OutOfMemory where it would take more than the limit.
        """
        known_bytes = self._needs.get(shapes)
        if known_bytes is not None and known_bytes > self.limit_bytes:
            raise OutOfMemory(known_bytes, "as it took before")
        recorded = self.graphs.recorded
        try:
            result, need_bytes = self._device.run(work, measure=known_bytes is None)
        except OPERATOR_ERRORS as error:
            detail = f"{type(error).__name__}: {error}"
            raise CallRefused(FailureKind.OPERATOR, detail[:2000]) from error
        if known_bytes is None or self.graphs.recorded != recorded:
            self._note(need_bytes)
        if known_bytes is None and len(self._needs) < _MOST_SHAPES:
            self._needs[shapes] = need_bytes
        return result, need_bytes

    def run(
        self,
        asked: ChannelCall,
        inputs: Inputs,
        shapes: tuple[Any, ...],
        work: Callable[[], Found],
    ) -> Found:
        """A call's work on the GPU, once; what it needs beyond the limit is asked for."""
        attempt = partial(self.attempt, shapes, work)
        result, need_bytes = self.with_room(asked, attempt, inputs)
        if need_bytes > self.limit_bytes:
            self._device.release()
            self._relieve(asked, OutOfMemory(need_bytes, "measured"))
        return result

    def with_room(
        self, asked: ChannelCall, work: Callable[[], Found], inputs: Inputs | None = None
    ) -> Found:
        """Do it; once more if memory was short, and no input was written to, after room is made."""
        try:
            return self._perhaps_alone(asked, work, inputs)
        except OutOfMemory as short:
            self.sessions.clear_copies()
            self.graphs.clear()
            self.park()
            self._relieve(asked, short)
            if inputs is not None:
                inputs.refuse_if_written()
        try:
            return self._perhaps_alone(asked, work, inputs)
        except OutOfMemory as short:
            raise self._too_much(short.need_bytes) from short

    def park(self) -> None:
        """Move what no function has to host memory, until a call needs it again."""
        for held in self.sessions.sole():
            if not held.parked:
                held.storage, held.parked = self._device.park(held.storage), True
        for park in self.parks:
            park()
        self._device.release()

    def _perhaps_alone(
        self, asked: ChannelCall, work: Callable[[], Found], inputs: Inputs | None
    ) -> Found:
        """Do it; once more without calls of other models if those have the memory that it needs."""
        try:
            return work()
        except OutOfMemory as short:
            if not short.by_others:
                raise
        if inputs is not None:
            inputs.refuse_if_written()
        self._together.become_alone(asked.needs)
        self._device.release_beside()
        return work()

    def _note(self, need_bytes: int) -> None:
        """Remember what a call took; what stays allocated afterwards is no other model's either."""
        held_bytes = self._device.used_bytes() if self._device.keeps_memory else 0
        self.peak_bytes = max(self.peak_bytes, need_bytes, held_bytes)
        self._more_held = True

    def _relieve(self, asked: ChannelCall, short: OutOfMemory) -> None:
        with self._together.yielded(asked.needs):  # their calls may end what has to leave
            limit_bytes, retry = self._ask_relief(asked.lease, short.need_bytes)
        if limit_bytes is not None:
            self.set_limit(limit_bytes)
        if not retry:
            raise self._too_much(short.need_bytes) from short

    def _too_much(self, need_bytes: int) -> CallRefused:
        detail = f"the call needs {need_bytes} bytes, {self.limit_bytes} are to be had"
        facts = {"need_bytes": need_bytes, "limit_bytes": self.limit_bytes}
        return CallRefused(FailureKind.OUT_OF_MEMORY, detail, facts)
