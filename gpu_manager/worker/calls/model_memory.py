"""What the calls of one model may use of its GPU's memory, what they took, and how more is had."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from gpu_manager.call_errors import CallRefused, OutOfMemory
from gpu_manager.devices.worker_device import WorkerDevice
from gpu_manager.worker.calls.call import ChannelCall
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.program.inputs import Inputs, SessionStorages
from gpu_manager.worker.program.recorded_runs import Graphs
from torch_shim.wire.protocol import FailureKind

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
    NotImplementedError,
    AssertionError,
    NameError,
)

# Asks the manager for more memory: lease and need in bytes; the new limit (None: it stays as it
# is) and whether to go on.
AskRelief = Callable[[int, int], tuple[int | None, bool]]


class ModelMemory:
    """The limit of one model, and what keeps its calls within it."""

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
