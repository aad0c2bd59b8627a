"""Searches inputs that take a parser where it has not been, and judges every one of them.

An input that took a new step is kept, and changed further. What it finds is in `SearchReport`.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hunt.parsers.arc_coverage import ArcCoverage
from hunt.parsers.hostile_inputs import hostile_inputs
from hunt.parsers.input_mutations import Mutations
from hunt.parsers.parser_target import (
    Fault,
    Target,
    fault_of,
    fault_of_memory,
    fault_of_time,
)

_MEASURED_EVERY = 64  # inputs; those that took a new step are measured too
_MOST_FAULTS = 40  # of different places
_RECENT = 0.3  # of the inputs to change are the one that was kept last


@dataclass
class SearchReport:
    """What came of one search; the faults are one for each place, with the input that showed it."""

    tried: int = 0
    arcs: int = 0
    seconds: float = 0.0
    kept: list[bytes] = field(default_factory=list)
    faults: dict[str, tuple[str, bytes]] = field(default_factory=dict)


class InputSearch:
    """One target's search. `note` is told each input before it is tried."""

    def __init__(
        self,
        target: Target,
        known: Sequence[bytes],
        folders: Sequence[str],
        seed: int,
        note: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self.report = SearchReport()
        self.coverage = ArcCoverage(folders)
        self._target = target
        self._chance = random.Random(f"{target.name}:{seed}")
        self._mutations = Mutations(target.form, self._chance, target.most_bytes)
        self._note = note
        self._inputs: list[bytes] = []
        self._begin = [*target.seeds(), *known, *hostile_inputs(target)]

    def run(self, seconds: float) -> SearchReport:
        """Try the seeds and what is known, and then changes of them until the time is over."""
        begun_s = time.monotonic()
        for data in self._begin:
            self._try(data)
        if not self._inputs:
            self._inputs.append(self._begin[0])
        while (took_s := time.monotonic() - begun_s) < seconds:
            self._try(self._next())
        self.report.seconds = took_s
        self.report.arcs = self.coverage.count
        self.report.kept = list(self._inputs)
        return self.report

    def _next(self) -> bytes:
        inputs = self._inputs
        data = inputs[-1] if self._chance.random() < _RECENT else self._chance.choice(inputs)
        return self._mutations.changed(data, self._chance.choice(inputs))

    def _try(self, data: bytes) -> None:
        self._note(data)
        self.report.tried += 1
        found: list[Fault | None] = []
        begun_s = time.thread_time()
        is_new = self.coverage.is_new(lambda: found.append(fault_of(self._target, data)))
        took_s = time.thread_time() - begun_s
        if found[0] is not None:  # the tracing itself needs a part of the stack: once more without
            self._add(fault_of(self._target, data), data)
        if is_new:
            self._inputs.append(data)
            self._mutations.show(data)
        if is_new or self.report.tried % _MEASURED_EVERY == 0:
            self._add(fault_of_memory(self._target, data), data)
        if took_s > self._target.cpu_s:
            self._add(fault_of_time(self._target, data), data)

    def _add(self, fault: Fault | None, data: bytes) -> None:
        faults = self.report.faults
        if fault is None or (fault.where not in faults and len(faults) >= _MOST_FAULTS):
            return
        before = faults.get(fault.where)
        if before is None or len(data) < len(before[1]):
            faults[fault.where] = fault.what, data
