"""How the calls of a group run as one: stacked whole, or with apart what is each call's own.

What a program's calls have apart is found out on copies, before such a group first runs.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.merging.merged_run import (
    hear_loops,
    loops_heard,
    run_merged,
    writes_to_shared,
)
from gpu_manager.worker.merging.records import (
    CannotMerge,
)
from gpu_manager.worker.merging.step_run import (
    KnownProgram,
    StepFunctions,
    StepRun,
    Uneven,
    WritesShared,
    leaves_of,
    made_for,
    plan_steps,
    users_of,
)
from gpu_manager.worker.orders import Singly
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import Inputs
from gpu_manager.worker.program.tensor_specs import view
from torch_shim.wire.programs import Ref

_MOST_PROGRAMS, _MOST_PLANS = 4096, 64
_STEPS_PER_DOUBLING = 4  # of a group's bytes: each step's need of memory is measured
_MOST_FORCED = 64  # steps that have to run apart although they touch weights


class Found(NamedTuple):
    """What a group gave, and how long it ran.

    Outputs that are not `lasting` lie beside those of other calls. In a trial `copies` are what
    stood in for the inputs that the program writes to, by position. The group `loops` over the
    calls where torch has no rule for an operator.
    """

    outputs: list[tuple[Any, ...]]
    lasting: bool
    spent_s: float
    copies: Sequence[dict[int, torch.Tensor]]
    loops: bool


class GroupRuns:
    """Runs groups of the calls of one model. One at a time."""

    def __init__(self) -> None:
        self._programs: dict[str, KnownProgram] = {}
        self._plans: OrderedDict[str, KnownProgram] = OrderedDict()

    def note_own(self, digest: str, written: set[int], returned: set[int]) -> bool:
        """A single call wrote to these inputs; outputs lie in those: they stay each call's own.

        False where too much is known of other programs: calls of this one cannot be merged.
        """
        if not written | returned:
            return True
        if digest not in self._programs and len(self._programs) >= _MOST_PROGRAMS:
            return False
        known = self._programs.setdefault(digest, KnownProgram())
        known.written |= written
        known.add_own(written | returned)
        return True

    def written(self, digest: str) -> set[int]:
        known = self._programs.get(digest)
        return set() if known is None else known.written

    def is_ready(self, program: BuiltProgram, calls: Sequence[Inputs]) -> bool:
        """Whether such a group was watched; else it has to be tried first."""
        own = _own(calls)
        found = self._programs.get(program.digest)
        if found is None:
            return not own
        return own <= found.inputs and (found.plan is not None or not found.any_own)

    def key_of(self, digest: str, calls: Sequence[Inputs]) -> Hashable:
        """Equal for groups of the same need of memory, or nearly so where shapes grow."""
        found = self._programs.get(digest)
        if found is None or not found.inputs:
            return calls[0].shapes
        size_bytes = sum(entry.tensor.nbytes for each in calls for entry in each.sent)
        return round(_STEPS_PER_DOUBLING * math.log2(1 + size_bytes))

    def run(self, program: BuiltProgram, calls: Sequence[Inputs], layouts: Sequence[Any]) -> Found:
        """The outputs of each call. If that fails, all inputs are as they were."""
        known = self._programs.get(program.digest)
        return self._timed(program, known, calls, layouts, [{}] * len(calls))

    def try_out(
        self, program: BuiltProgram, calls: Sequence[Inputs], layouts: Sequence[Any]
    ) -> Found:
        """The same with copies of what the program writes to, watched first if need be."""
        own = _own(calls)
        known = self._programs.get(program.digest)
        if known is None:
            full = len(self._programs) >= _MOST_PROGRAMS
            if full or not own:
                try:
                    return self._timed(program, None, calls, layouts, [{}] * len(calls))
                except RuntimeError as error:
                    if full or not writes_to_shared(error):
                        raise
            known = self._programs[program.digest] = KnownProgram()
        known.add_own(own)
        if known.plan is None:
            self._watch(program, known, calls)
        return self._timed(program, known, calls, layouts, _copies(calls, known.written))

    def _timed(
        self,
        program: BuiltProgram,
        known: KnownProgram | None,
        calls: Sequence[Inputs],
        layouts: Sequence[Any],
        copies: Sequence[dict[int, torch.Tensor]],
    ) -> Found:
        hear_loops()
        begun_s = time.perf_counter()
        if known is not None and known.any_own:
            outputs, lasting = self._run(program, known, calls, copies, layouts), True
        else:
            outputs, lasting = run_merged(program, calls, layouts), False
        spent_s = time.perf_counter() - begun_s
        return Found(outputs, lasting, spent_s, copies, loops_heard.any)

    def _run(
        self,
        program: BuiltProgram,
        known: KnownProgram,
        calls: Sequence[Inputs],
        copies: Sequence[dict[int, torch.Tensor]],
        layouts: Sequence[Any],
    ) -> list[tuple[Any, ...]]:
        values = _with(calls, copies)
        leaves = [
            [leaf.number] if isinstance(leaf, Ref) else leaf
            for leaf in leaves_of(program.source.output)
        ]
        while True:
            plan = known.plan or self._make_plan(program, known, calls)
            run = _step_run(program, known, calls, values)
            try:
                run.run(plan)
                return run.outputs(leaves, layouts)
            except BaseException as error:
                run.undo()
                for each in calls:
                    each.note_restored()
                if not isinstance(error, Uneven):
                    raise
                self._force(program, known, error)

    def _watch(self, program: BuiltProgram, known: KnownProgram, calls: Sequence[Inputs]) -> None:
        while True:
            plan = _functions(program, known, calls, one_by_one=True)
            values = _with(calls, _copies(calls, known.written))
            try:
                known.writes |= _step_run(program, known, calls, values).watch(plan)
            except Uneven as uneven:
                self._force(program, known, uneven)
            except WritesShared as shared:
                makers = made_for(program.source, shared.step)
                if not makers or makers <= known.made:
                    raise CannotMerge(Singly.WRITES) from shared
                known.made |= makers
            else:
                break
        self._make_plan(program, known, calls)

    def _force(self, program: BuiltProgram, known: KnownProgram, uneven: Uneven) -> None:
        steps = users_of(program.source, uneven.segment.numbers, uneven.value)
        if steps <= known.forced or len(known.forced) >= _MOST_FORCED:
            known.forced.clear()
            known.plan = None
            raise CannotMerge(Singly.SHAPES)
        known.forced |= steps
        known.plan = None

    def _make_plan(
        self, program: BuiltProgram, known: KnownProgram, calls: Sequence[Inputs]
    ) -> list[StepFunctions]:
        """Make a plan and keep it; that of another program leaves if there are too many."""
        plan = known.plan = _functions(program, known, calls, one_by_one=False)
        self._plans[program.digest] = known
        self._plans.move_to_end(program.digest)
        if len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)[1].plan = None
        return plan


def _own(calls: Sequence[Inputs]) -> set[int]:
    """The inputs that calls have apart: kept ones, those of other shapes, and other numbers."""
    first, *others = calls
    positions = {entry.position for each in calls for entry in each.sent if entry.held.key}
    for position, value in enumerate(first.values):
        if isinstance(value, torch.Tensor):
            layout = value.shape, value.stride()
            if any(
                (it.values[position].shape, it.values[position].stride()) != layout for it in others
            ):
                positions.add(position)
        elif any(repr(each.values[position]) != repr(value) for each in others):
            positions.add(position)
    return positions


def _functions(
    program: BuiltProgram, known: KnownProgram, calls: Sequence[Inputs], *, one_by_one: bool
) -> list[StepFunctions]:
    segments = plan_steps(program.source, known, _weights(calls[0]), one_by_one=one_by_one)
    some = program.some_steps
    return [StepFunctions(each, some(each.steps), tuple(map(some, each.undo))) for each in segments]


def _step_run(
    program: BuiltProgram, known: KnownProgram, calls: Sequence[Inputs], values: list[list[Any]]
) -> StepRun:
    own = known.inputs
    tensors = {entry.position for entry in calls[0].sent if entry.held.image is None}
    first = calls[0].values
    shared = {
        number: value
        for number, value in enumerate([*first, *program.constants])
        if number not in own and number not in tensors
    }
    sent = {number: [each[number] for each in values] for number in tensors - own}
    return StepRun(
        len(calls), shared, sent, {number: [each[number] for each in values] for number in own}
    )


def _weights(inputs: Inputs) -> set[int]:
    sent = {entry.position for entry in inputs.sent if entry.held.image is None}
    return {
        position
        for position, value in enumerate(inputs.values)
        if isinstance(value, torch.Tensor) and position not in sent
    }


def _copies(calls: Sequence[Inputs], positions: set[int]) -> list[dict[int, torch.Tensor]]:
    """Copies of these inputs of each call; those in one storage are in one again."""
    found = []
    for each in calls:
        storages: dict[int, torch.UntypedStorage] = {}
        copies = {}
        for entry in each.sent:
            if entry.position in positions:
                held = entry.held
                if id(held) not in storages:
                    storages[id(held)] = held.storage.clone()  # type: ignore[no-untyped-call] # torch gives it no types
                copies[entry.position] = view(storages[id(held)], entry.spec)
        found.append(copies)
    return found


def _with(calls: Sequence[Inputs], copies: Sequence[dict[int, torch.Tensor]]) -> list[list[Any]]:
    return [
        [own.get(position, value) for position, value in enumerate(each.values)]
        for each, own in zip(calls, copies, strict=True)
    ]
