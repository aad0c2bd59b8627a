"""Which calls of one process may run at the same time: those that agree on what it has once.

The settings of torch's arithmetic, its default dtype and its generator are the process's, and so is
its turn on a GPU that several processes use.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.gpu_turns import GpuTurns, SlotTurns
from gpu_manager.worker.calls.admitted_leases import LeaseClocks
from torch_shim.wire.arithmetic import arithmetic_in_force, use_arithmetic
from torch_shim.wire.messages import Arithmetic
from torch_shim.wire.protocol import FailureKind

# After this time in one turn, further calls wait for the next one: other processes wait, too.
_MOST_TURN_S = 0.05


class CallNeeds(NamedTuple):
    """What a call needs of the process while it runs."""

    arithmetic: Arithmetic
    default_dtype: torch.dtype
    random: bool  # it seeds torch's generator, and draws from it
    alone: bool = False


class CallsTogether:
    """Lets calls in, in the order in which they came, as soon as they suit those under way."""

    def __init__(self) -> None:
        self.clocks = LeaseClocks()
        self.slots = SlotTurns()  # where leases have parts of the GPU
        self.turns: GpuTurns | None = None  # where one process has the GPU
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._under_way = 0
        self._is_random = self._is_alone = False
        self._takes_turn = False
        self._turn_s = 0.0
        self._arithmetic = Arithmetic()  # in force
        self._dtype = self._usual_dtype = torch.get_default_dtype()

    def call(self, needs: CallNeeds) -> AbstractContextManager[None]:
        """Wait until a call may run, with all that it needs, and end it."""
        return _CallUnderWay(self, needs)

    @contextmanager
    def yielded(self, needs: CallNeeds) -> Iterator[None]:
        """In a call: wait for something else meanwhile, while others run."""
        self.leave(needs)
        try:
            yield
        finally:
            self.enter(needs)

    def become_alone(self, needs: CallNeeds) -> None:
        """In a call: let those beside it end, and let in none until it has ended itself."""
        self.leave(needs)
        self.enter(needs._replace(alone=True))

    def enter(self, needs: CallNeeds) -> None:
        """Begin a call when it is its turn."""
        with self._changed:
            if self._waiting or not self._suits(needs):
                self._wait(needs)
            first = not self._under_way
            if first:
                self._use(needs)
                self._takes_turn = self.turns is not None
            self._under_way += 1
            self._is_random |= needs.random
            self._is_alone |= needs.alone
        if first and self.turns is not None:
            self._take_turn(needs, self.turns)

    def _wait(self, needs: CallNeeds) -> None:
        """Wait in line until the call suits those under way; the lock is held."""
        ticket = object()
        self._waiting.append(ticket)
        self._changed.wait_for(lambda: self._waiting[0] is ticket and self._suits(needs))
        self._waiting.popleft()
        self._changed.notify_all()

    def _take_turn(self, needs: CallNeeds, turns: GpuTurns) -> None:
        """Other calls wait meanwhile: another process may have its turn."""
        taken = False
        try:
            turns.__enter__()
            taken = True
        finally:
            with self._changed:
                self._takes_turn = False
                self._turn_s = time.monotonic()
                if not taken:
                    self._under_way -= 1
                    self._is_random &= not needs.random
                self._changed.notify_all()

    def leave(self, needs: CallNeeds) -> None:
        """End a call."""
        with self._changed:
            self._under_way -= 1
            self._is_random &= not needs.random
            if not self._under_way:
                self._is_alone = False
                if self.turns is not None:
                    self.turns.__exit__(None, None, None)
                self._use_dtype(self._usual_dtype)
            if self._waiting:
                self._changed.notify_all()

    def _suits(self, needs: CallNeeds) -> bool:
        if not self._under_way:
            return True
        if self._takes_turn or self._is_alone or needs.alone:
            return False
        if self._is_random and needs.random:
            return False
        if self.turns is not None and time.monotonic() - self._turn_s > _MOST_TURN_S:
            return False
        return (needs.arithmetic, needs.default_dtype) == (self._arithmetic, self._dtype)

    def _use(self, needs: CallNeeds) -> None:
        """Set what the process has once, whatever it was: nobody else relies on it now."""
        if needs.arithmetic != arithmetic_in_force():
            use_arithmetic(needs.arithmetic)
        self._arithmetic = needs.arithmetic
        torch._C._set_deterministic_fill_uninitialized_memory(True)  # noqa: SLF001 - no public function
        self._use_dtype(needs.default_dtype)

    def _use_dtype(self, dtype: torch.dtype) -> None:
        if dtype is not torch.get_default_dtype():
            try:
                torch.set_default_dtype(dtype)
            except TypeError as error:
                detail = f"{dtype} cannot be the default"
                raise CallRefused(FailureKind.BAD_FRAME, detail) from error
        self._dtype = dtype


class _CallUnderWay:
    """One call, from its turn to its end; every call has one, so it is no generator."""

    def __init__(self, together: CallsTogether, needs: CallNeeds) -> None:
        self._together = together
        self._needs = needs

    def __enter__(self) -> None:
        self._together.enter(self._needs)

    def __exit__(self, *_: object) -> None:
        self._together.leave(self._needs)
