"""Several functions whose calls of one model wait for the same turn."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from gpu_manager.worker.merging.call_line import CallLine
from gpu_manager.worker.merging.merged_calls import MergedCalls
from gpu_manager.worker.merging.records import MergeRecord, MergeRecords
from gpu_manager.worker.orders import Admission
from tests.kit.waiting import wait_until
from tests.kit.worlds.caller import (
    Caller,
    CallFailed,
    LocalWorker,
    Reply,
    weight,
)
from torch_shim.wire.programs import Program

FIRST_LEASE = 100
RUN_S = 0.02


class Sent(NamedTuple):
    """What one caller sends: several inputs, and what is its own about the call."""

    values: tuple[Any, ...]
    more: dict[str, Any]


class PayingRecord(MergeRecord):
    """One that is told that groups of any size take as long as a single call.

    On a busy machine two comparisons of a size may be held up, and it then rests.
    """

    def note_single(self, run_s: float) -> None:  # noqa: ARG002 - it is what a busy machine says
        super().note_single(RUN_S)

    def note_compared(self, size: int, merged_s: float, singles_s: float) -> None:  # noqa: ARG002
        super().note_compared(size, RUN_S, size * RUN_S)
        self.pauses = 0.0

    def note_merged(self, size: int, merged_s: float) -> None:  # noqa: ARG002
        super().note_merged(size, RUN_S)


def merging_pays(worker: LocalWorker) -> LocalWorker:
    """Have running as one pay always, and be compared at once."""
    worker.executor.run_s = RUN_S
    merged = worker.part(MergedCalls)
    merged.pace.pauses = 0.0
    merged.records = MergeRecords(PayingRecord)
    return worker


class Crowd:
    """Callers of one worker, each a session with a lease of its own."""

    def __init__(self, worker: LocalWorker, size: int, arena_bytes: int = 1 << 20) -> None:
        self.worker = worker
        self.callers: list[Caller] = []
        for number in range(size):
            session = f"s{number}"
            self.callers.append(worker.connect(session, arena_bytes))
            worker.leases.admit(Admission(FIRST_LEASE + number, session))
        self._bindings: list[int] = []
        self._lacks = 0
        self._threads = ThreadPoolExecutor(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in self.callers:
            caller.wire.close()
        self._threads.shutdown()

    def bind(self, what: Program, weights: Sequence[torch.Tensor], behind: int = 1) -> None:
        """Every caller binds the image's tensors as the inputs behind the first ones."""
        table = self.worker.weights
        bound = {n + behind: weight(table, n, like) for n, like in enumerate(weights)}
        self._bindings = [caller.bind(what, bound) for caller in self.callers]
        self._lacks = len(weights)

    def call(self, what: Program, inputs: Sequence[Any], **more: Any) -> list[Any]:
        """Calls that wait together, in this order: each one's outputs, or the error it ended by.

        A caller whose input is None does not call.
        """
        return [_outcome(each) for each in self.begin(what, inputs, **more)]

    def begin(
        self,
        what: Program,
        inputs: Sequence[Any],
        meanwhile: Callable[[], object] = int,
        **more: Any,
    ) -> list["Future[Reply]"]:
        """The same, under way; `meanwhile` is done when all of them wait."""
        line, found = self.worker.part(MergedCalls).line(), []
        with self.worker.executor.gate:
            for number, sent in enumerate(inputs):
                if sent is not None:
                    found.append(self._threads.submit(self._one, number, what, sent, **more))
                    wait_until(partial(_is_long, line, len(found)), "the call is in line")
            meanwhile()
        return found

    def learn(self, what: Program, inputs: Sequence[Any], rounds: int = 4) -> None:
        """Call as often as it takes until such calls are compared and measured."""
        for _ in range(rounds):
            for outcome in self.call(what, inputs):
                assert isinstance(outcome, list), outcome

    def _one(self, number: int, what: Program, sent: Any, **more: Any) -> Reply:
        values, own = sent if isinstance(sent, Sent) else ((sent,), {})
        binding = self._bindings[number] if self._bindings else None
        return self.callers[number].call(
            what,
            *values,
            *[None] * self._lacks,
            lease=FIRST_LEASE + number,
            binding=binding,
            **more,
            **own,
        )


def _outcome(call: "Future[Reply]") -> Any:
    error = call.exception()
    if error is None:
        return call.result().outputs
    if not isinstance(error, CallFailed):
        raise error
    return error


def _is_long(line: CallLine, length: int) -> bool:
    return len(line) == length
