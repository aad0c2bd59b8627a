"""One call: inputs in, the program run within the model's memory, its result delivered."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gpu_manager.call_errors import CallRefused, OutOfMemory, ShareRefused
from gpu_manager.devices.worker_device import DeviceImage, WorkerDevice
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.call import CallAnswer, ChannelCall, GraphCall, Packer, computing
from gpu_manager.worker.calls.model_memory import ModelMemory
from gpu_manager.worker.orders import LeaseTerms
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.channel_state import TensorInput
from gpu_manager.worker.program.inputs import InputReader, Inputs
from gpu_manager.worker.program.recorded_runs import ProgramRun
from gpu_manager.worker.program.tensor_specs import versions_of
from gpu_manager.worker.usage import ModelUsage
from torch_shim.wire.protocol import FailureKind

Found = TypeVar("Found")
# Looks at what a run gave before it is delivered, and at whether it wrote to inputs or constants.
Look = Callable[[Inputs, ProgramRun, bool], None]


class SingleCalls:
    """Runs the calls of one model, one at a time, for whoever has the model's turn."""

    def __init__(
        self,
        device: WorkerDevice,
        leases: AdmittedLeases,
        memory: ModelMemory,
        images: dict[str, DeviceImage],
    ) -> None:
        self.device = device
        self.memory = memory
        self.run_s = 0.0  # that a call takes at least, on an emulated GPU, with all its share
        self.share = 1.0  # of the GPU that the model has at most
        self._slowed = 1.0  # times as long as that on the slots of the lease
        self._defers = False  # emulated time passes after the call, while others of the model run
        self._owed_s = 0.0
        self._leases = leases
        self._images = images
        self.usage = ModelUsage(emulated=device.device.type == "cpu")

    def use_terms(self, terms: LeaseTerms) -> None:
        """Compute on a lease's slots from now on: with fewer of them it takes longer in proportion.

        Of an emulated GPU, which has no other speed than its host's.
        """
        share = min(self.share, terms.share)
        self._slowed, self._defers, self._owed_s = self.share / share, bool(terms.slots), 0.0
        try:
            self.device.serve(share, terms.vcpus)
        except ShareRefused as refused:
            raise CallRefused(FailureKind.OPERATOR, str(refused)) from refused

    @property
    def least_s(self) -> float:
        """What a run takes at least on the lease's slots, on an emulated GPU."""
        return self.run_s * self._slowed

    def take_owed_s(self) -> float:
        """The emulated time that has to pass yet, on the lease's slots, for the runs up to now."""
        owed_s, self._owed_s = self._owed_s, 0.0
        return owed_s

    def run(self, asked: ChannelCall, asked_s: float, look: Look | None = None) -> CallAnswer:
        """Run a call and deliver its result; CallRefused where it cannot be answered."""
        call = asked.call
        self.admit(asked)
        begun_s = time.perf_counter()
        try:
            inputs = self.memory.perhaps_alone(call.needs, lambda: self.inputs(asked))
        except OutOfMemory as short:
            self.memory.make_room(call, short)
            inputs = self.memory.perhaps_alone(call.needs, lambda: self.inputs(asked))
        times = [begun_s - asked_s, time.perf_counter() - begun_s, 0.0, 0.0]
        return self.answer(asked, inputs, times, look)

    def admit(self, asked: ChannelCall) -> None:
        """Refuse it unless its lease is in force; forget what the function needs no more."""
        self._leases.check(asked.call.lease)
        residents = asked.call.options.residents
        if residents is not None:
            asked.channel.kept.drop(residents.dropped)

    def inputs(self, asked: ChannelCall) -> Inputs:
        call, channel = asked.call, asked.channel
        prepared: Inputs | None = channel.prepared(call.number, call.inputs, call.binding)
        area = asked.body if channel.arena is None else channel.arena
        if prepared is not None:
            return prepared.refilled(area)
        how = {"borrows": call.program.borrows, "reads_only": call.program.reads_only}
        reader = InputReader(self.device, self._images, channel.kept, area, **how)
        inputs = reader.call(call.inputs, call.program.inputs, call.binding)
        if inputs.refill is not None and channel.arena is not None:
            channel.prepare(call.number, call.inputs, call.binding, inputs)
        return inputs

    def answer(
        self, asked: ChannelCall, inputs: Inputs, times: list[float], look: Look | None = None
    ) -> CallAnswer:
        """Run the program and deliver what it gave, leaving images and constants as they were."""
        call = asked.call
        program = call.program
        before = versions_of(program.constants)
        changed: list[TensorInput] | None = None
        try:
            begun, begun_s = self.usage.begin(), time.perf_counter()
            run = self._run_within_limit(call, inputs)
            written = inputs.changed()
            refuse_reshaped(written)
            rng = call.options.rng
            rng = None if rng is None else self.device.seeded(rng)
            spent_s = time.perf_counter() - begun_s
            times[2] = self.emulated_s(spent_s)
            moved = inputs.received_bytes, sum_of_bytes(run.outputs)
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
        call = asked.call
        packer = Packer(
            [*inputs.positions, run.positions],
            call.program.constants,
            asked.channel.kept,
            call.options.keys,
            call.options.residents,
        )
        result = packer.pack(run.outputs, written, lasting=run.lasting)
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
            asked.channel.forget_prepared(asked.call.number)
            self.settle(inputs.changed(), asked, finished=False)
        elif changed:
            self.settle(changed, asked, finished=True)

    def settle(self, changed: list[TensorInput], asked: ChannelCall, *, finished: bool) -> None:
        """After a program wrote to inputs: images are restored, kept storages have a new epoch.

        A call that failed half-way leaves kept storages in no state that the shim knows of.
        """
        binding, kept = asked.call.binding, asked.channel.kept
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

    def _run_within_limit(self, call: GraphCall, inputs: Inputs) -> ProgramRun:
        shapes = (call.program.digest, *inputs.shapes)
        mode = call.mode

        def seeded() -> ProgramRun:
            if call.options.rng is not None:
                self._seed(call.options.rng)
            with computing(self.device.device, mode):
                return self.memory.graphs.run(call.program, call.binding, inputs, mode)

        return self.memory.run(call, inputs, shapes, seeded)

    def _seed(self, state: bytes) -> None:
        try:
            self.device.seed(state)
        except (RuntimeError, TypeError) as error:
            raise CallRefused(FailureKind.BAD_FRAME, f"generator's state: {error}") from error


def refuse_reshaped(written: Sequence[TensorInput]) -> None:
    """CallRefused where an input that a program wrote to got another shape by that."""
    if not all(entry.keeps_its_shape() for entry in written):
        raise CallRefused(FailureKind.OPERATOR, "an input got another shape in place")


def sum_of_bytes(outputs: Sequence[Any]) -> int:
    return sum(each.nbytes for each in outputs if isinstance(each, torch.Tensor))
