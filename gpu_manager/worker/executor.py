"""The calls of one model, one at a time, and what they have in common."""

import threading
import time
from collections.abc import Callable
from typing import Any

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.lent_memory import IDLE_S, IdleTimer
from gpu_manager.devices.worker_device import DeviceImage, Unshare, WorkerDevice
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.call import CallAnswer, ChannelCall, Deliver, GraphCall
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.calls.model_memory import AskRelief, ModelMemory
from gpu_manager.worker.calls.single_call import SingleCalls
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.channel_state import Binding, ChannelState, KeptStorages
from gpu_manager.worker.program.inputs import InputReader
from gpu_manager.worker.program.tensor_specs import bytes_of
from torch_shim.wire.messages import SentTensor
from torch_shim.wire.protocol import FailureKind

# Calls a function with some arguments when a call has the turn of its slots, model and process.
InTurn = Callable[..., CallAnswer]
# Answers a call when it has its turn, or has another call's turn answer it.
RunCall = Callable[[ChannelCall, InTurn], CallAnswer]


class Executor:
    """Runs the calls of one model, and keeps what they have in common."""

    def __init__(
        self,
        device: WorkerDevice,
        leases: AdmittedLeases,
        ask_relief: AskRelief,
        together: CallsTogether,
    ) -> None:
        """`together` is the process's: it lets in the calls of all models."""
        self.device = device
        self.images: dict[str, DeviceImage] = {}
        self.gate = threading.Lock()  # held while a call of the model runs
        self.memory = ModelMemory(device, self.gate, ask_relief, together)
        self.sessions = self.memory.sessions
        self.single = SingleCalls(device, leases, self.memory, self.images)
        self._together = together
        self._leases = leases
        self._run: RunCall = self._run_singly
        self._trimming = IdleTimer(IDLE_S, self._trim_files)

    def extend(self, park: Callable[[], None], run: RunCall | None) -> None:
        """Have a feature park what it has where memory is short, and run the calls, if it does.

        There was no call yet.
        """
        self.memory.also_parks(park)
        if run is not None:
            self._run = run

    def share(self, area: memoryview, former: Unshare | None) -> Unshare | None:
        """Prepare an area instead of the former one; not during a call, which may be recorded."""
        with self.gate:
            if former is not None:
                former()
            return self.device.share(area) if len(area) else None

    def share_block(self, kept: KeptStorages, key: int, memory: memoryview) -> None:
        """Prepare a block of a function's memory, so that calls may name it."""
        with self.gate:
            kept.blocks.add(key, memory, self.device.share)

    def bind(
        self,
        number: int,
        described: dict[int, SentTensor],
        program: BuiltProgram,
        kept: KeptStorages,
    ) -> Binding:
        with self.gate:
            reader = InputReader(self.device, self.images, kept)
            return reader.binding(number, described, program.inputs)

    def forget(self, kept: KeptStorages, keys: list[int]) -> None:
        with self.gate:
            kept.drop(keys)
        self._give_up_idle_files()

    def forget_session(self, kept: KeptStorages) -> None:
        with self.gate:
            kept.clear()

    def _give_up_idle_files(self) -> None:
        """Have the files that no function reads be given up, unless they are used again soon."""
        if not self._trimming.is_due and self.sessions.any_free_file():
            self._trimming.ask()

    def _trim_files(self) -> None:
        with self.gate:
            self.sessions.trim_files(time.monotonic() - IDLE_S)
        self._give_up_idle_files()

    def fetch(
        self, kept: KeptStorages, key: int, epoch: int, room: Callable[[int], memoryview]
    ) -> int:
        """Copy a kept storage to memory of its size, which `room` gives; return the size."""
        with self.gate:
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
        """Run a call; CallRefused where it cannot be answered."""
        asked = ChannelCall(call, channel, body, deliver, self._leases.terms(call.lease))
        try:
            return self._run(asked, self._in_turn)
        finally:
            self.memory.keep_within_limit()
            self.device.after_call()
            self._give_up_idle_files()

    def _run_singly(self, asked: ChannelCall, in_turn: InTurn) -> CallAnswer:
        asked_s = time.perf_counter()
        return in_turn(asked, self.single.run, asked, asked_s)

    def _in_turn(
        self, asked: ChannelCall, work: Callable[..., CallAnswer], *arguments: Any
    ) -> CallAnswer:
        """Do the work of a call, or of several, when its slots, its model and its process are free.

        What emulated slots take beyond the computing passes while the model's calls on other slots
        compute.
        """
        with self._together.slots.turn(asked.terms.slots):
            with self.gate, self._together.call(asked.call.needs):
                self.single.use_terms(asked.terms)
                answer = work(*arguments)
                owed_s = self.single.take_owed_s()
            if owed_s:
                time.sleep(owed_s)
            return answer
