"""The calls of one model and what they have in common: one at a time, or several as one."""

import contextlib
import threading
import time
from collections.abc import Callable

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.lent_memory import IDLE_S
from gpu_manager.devices.worker_device import DeviceImage, SharedArea, WorkerDevice
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.call import CallAnswer, ChannelCall, Deliver, GraphCall
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.calls.model_memory import AskRelief, ModelMemory
from gpu_manager.worker.calls.single_call import SingleCalls
from gpu_manager.worker.data import DataInWorker
from gpu_manager.worker.merging.call_line import CallInLine, CallLine
from gpu_manager.worker.merging.likeness import Likenesses
from gpu_manager.worker.merging.merged_calls import MergedCalls
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.channel_state import Binding, ChannelState, KeptStorages
from gpu_manager.worker.program.inputs import InputReader
from gpu_manager.worker.program.tensor_specs import bytes_of
from torch_shim.wire.messages import SentTensor
from torch_shim.wire.protocol import FailureKind

_MOST_LINES = 64  # of calls, by slots, before those are forgotten in which nobody stands


class Executor:
    """Runs the calls of one model, and keeps what they have in common."""

    def __init__(
        self,
        device: WorkerDevice,
        leases: AdmittedLeases,
        ask_relief: AskRelief,
        together: CallsTogether,
    ) -> None:
        """`together` is the process's: it lets in the calls of all models, and has their data."""
        self.device = device
        self.images: dict[str, DeviceImage] = {}
        self._together = together
        self._gate = threading.Lock()
        self.data = DataInWorker(device, self._gate, together.published)
        self.memory = ModelMemory(device, self.data, self._gate, ask_relief, together)
        self.sessions = self.memory.sessions
        self.single = SingleCalls(device, leases, self.memory, self.images)
        self.merged = MergedCalls(self.single)
        self._leases = leases
        self._likenesses = Likenesses()
        self._lines: dict[tuple[int, ...], CallLine] = {}  # by the slots of their leases
        self._trimming: threading.Timer | None = None

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
        self,
        number: int,
        described: dict[int, SentTensor],
        program: BuiltProgram,
        kept: KeptStorages,
    ) -> Binding:
        with self._gate:
            reader = InputReader(self.device, self.images, kept)
            return reader.binding(number, described, program.inputs)

    def forget(self, kept: KeptStorages, keys: list[int]) -> None:
        with self._gate:
            kept.drop(keys)
        self._give_up_idle_files()

    def forget_session(self, kept: KeptStorages) -> None:
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
        """Run a call, alone or as one with others; CallRefused where it cannot be answered."""
        terms = self._leases.terms(call.lease)
        waiting = CallInLine(ChannelCall(call, channel, body, deliver, terms))
        line = self.line(terms.slots)
        try:
            if not line.stand(waiting):
                return waiting.outcome()
            try:
                with self._together.slots.turn(terms.slots):
                    return self._answer(waiting, line)
            finally:
                line.leave()
        finally:
            self.memory.keep_within_limit()
            self.device.after_call()
            self._give_up_idle_files()

    def line(self, slots: tuple[int, ...] = ()) -> CallLine:
        """The line of calls whose leases have these slots, or the whole GPU."""
        line = self._lines.get(slots)
        if line is None:
            if len(self._lines) > _MOST_LINES:
                self._lines = {known: each for known, each in self._lines.items() if len(each)}
            line = self._lines.setdefault(slots, CallLine(self._likenesses.of))
        return line

    def _answer(self, first: CallInLine, line: CallLine) -> CallAnswer:
        """Answer a call that has its line's turn and its slots, perhaps with others of the line.

        What emulated slots take beyond the computing passes while the model's calls on other slots
        compute.
        """
        call = first.asked.call
        with self._gate, self._together.call(call.needs):
            self.single.use_terms(first.asked.terms)
            answer = self.merged.answer(first, line)
            owed_s = self.single.take_owed_s()
        if owed_s:
            time.sleep(owed_s)
        return answer
