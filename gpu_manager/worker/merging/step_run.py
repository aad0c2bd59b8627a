"""A program run for several calls by a plan: some steps once for all, some once for each call.

A value is shared (the same for all calls), stacked (one tensor for all, its first dimension the
calls), or apart (a list of what each call has). Steps for all run under torch's vmap.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.merging.merged_run import as_laid_out, writes_to_shared
from gpu_manager.worker.merging.records import (
    CannotMerge,
    Layout,
)
from gpu_manager.worker.orders import Singly
from gpu_manager.worker.program.build import references
from gpu_manager.worker.program.tensor_specs import identity
from gpu_manager.worker.program.usage import Run
from torch_shim.wire.programs import (
    Mapping,
    Program,
    ProgramPart,
    ProgramStep,
    Ref,
    Tuple,
    renumbered,
    renumbered_step,
)

_functorch = torch._C._functorch  # noqa: SLF001 - what torch's own vmap calls


# Which steps of a program run once for several calls, and which once for each of them.
#
# What is each call's own (a cache that stays in the worker, of whatever length) stays apart: steps
# that touch it run for each call, on its own tensors. Where such a result meets weights, the
# calls' results are put together again. So what costs most, the weights, is read once for all.

# How a step that overwrites a part of a tensor would read that part before, by its operator; any
# other one overwrites all of its first argument.
_PARTLY = {"m:index_copy_": "m:index_select", "o:setitem": "o:getitem"}
_INDEX_ARGUMENTS = {"m:index_copy_": 3, "o:setitem": 2}  # and the tensor itself
_PERHAPS_VIEW = "o:setitem"  # what is read there may be no copy


@dataclass
class KnownProgram:
    """What was found out about a program, which only grows, and its plan once it was watched."""

    inputs: set[int] = field(default_factory=set)  # that are each call's own
    written: set[int] = field(default_factory=set)  # of these: inputs that the program writes to
    forced: set[int] = field(default_factory=set)  # steps to run apart that touch weights
    writes: set[int] = field(default_factory=set)  # steps that write to their first argument
    made: set[int] = field(default_factory=set)  # steps that make, of nothing, what is written to
    plan: "list[StepFunctions] | None" = None

    @property
    def any_own(self) -> bool:
        return bool(self.inputs or self.made)

    def add_own(self, inputs: set[int]) -> None:
        if not inputs <= self.inputs:
            self.inputs |= inputs
            self.plan = None


class Segment(NamedTuple):
    """Steps one after the other that run together, or apart.

    `takes` and `gives` are the numbers of values; those of `drops` are needed no more afterwards.
    `undo` is none or two, which take what the step takes: one gives a copy of what the step
    overwrites, the other one takes that copy behind the others, and writes it back.
    """

    apart: bool
    numbers: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    steps: ProgramPart
    undo: tuple[ProgramPart, ...]


def plan_steps(
    program: Program, known: KnownProgram, weights: Iterable[int], *, one_by_one: bool = False
) -> list[Segment]:
    """The segments of a program without parts; `weights` are the inputs that all calls share."""
    first = program.inputs + len(program.constants)
    uses = [tuple(dict.fromkeys(references(_parts(step)))) for step in program.steps]
    apart = _apart(program, uses, known, {*weights, *range(program.inputs, first)})
    runs: list[list[int]] = []
    for number in range(len(program.steps)):
        alone = one_by_one or number in known.writes or number - 1 in known.writes
        if runs and not alone and apart[number] == apart[number - 1]:
            runs[-1].append(number)
        else:
            runs.append([number])
    last = {used: number for number, used_by in enumerate(uses) for used in used_by}
    kept = set(references(program.output))
    segments = []
    for numbers in runs:
        made = {first + number for number in numbers}
        used = dict.fromkeys(value for number in numbers for value in uses[number])
        takes = tuple(value for value in used if value not in made)
        end = numbers[-1]
        gives = tuple(v for v in sorted(made) if v in kept or last.get(v, -1) > end)
        drops = tuple(value for value in takes if value not in kept and last[value] <= end)
        steps = [program.steps[number] for number in numbers]
        undo = _undo(steps[0], takes) if numbers[0] in known.writes else ()
        part = _part(steps, takes, first + numbers[0], gives)
        segments.append(Segment(apart[end], tuple(numbers), takes, gives, drops, part, undo))
    return segments


def users_of(program: Program, numbers: Sequence[int], value: int) -> set[int]:
    return {number for number in numbers if value in references(_parts(program.steps[number]))}


def makers_of(program: Program, value: int) -> set[int]:
    """The steps that a value comes from, the first ones among them."""
    first = program.inputs + len(program.constants)
    steps: set[int] = set()
    values = [value]
    while values:
        number = values.pop() - first
        if number >= 0 and number not in steps:
            steps.add(number)
            values += references(_parts(program.steps[number]))
    return steps


def made_for(program: Program, writer: int) -> set[int]:
    """The steps that make what this step writes to, of nothing that is sent.

    And those that make what others like it write to, so that one look finds the caches of all
    layers.
    """
    first = program.inputs + len(program.constants)
    steps: set[int] = set()
    for number, step in enumerate(program.steps):
        target, *_ = (*step.arguments, None)
        if step.operator == program.steps[writer].operator and isinstance(target, Ref):
            makers = makers_of(program, target.number)
            used = [value for each in makers for value in references(_parts(program.steps[each]))]
            if number == writer or all(value >= first for value in used):
                steps |= makers
    return steps


def leaves_of(output: Any) -> list[Any]:
    """The leaves of a program's output, in order: references and values."""
    if isinstance(output, Mapping):
        output = output.items[1::2]
    elif isinstance(output, Tuple):
        output = output.items
    if isinstance(output, list):
        return [leaf for item in output for leaf in leaves_of(item)]
    return [output]


def _apart(
    program: Program, uses: Sequence[Sequence[int]], known: KnownProgram, shared: set[int]
) -> list[bool]:
    first = program.inputs + len(program.constants)
    own, found = set(known.inputs), []
    for number, used in enumerate(uses):
        meets_weights = not shared.isdisjoint(used)
        forced = number in known.forced or number in known.writes
        is_apart = number in known.made or (
            not own.isdisjoint(used) and (forced or not meets_weights)
        )
        found.append(is_apart)
        if is_apart:
            own.add(first + number)
        elif used and shared.issuperset(used):
            shared.add(first + number)
    return found


def _parts(step: ProgramStep) -> list[Any]:
    return [step.arguments, list(step.named.values())]


def _part(
    steps: Sequence[ProgramStep], takes: Sequence[int], first: int, gives: Sequence[int]
) -> ProgramPart:
    """These steps as a function of what they take; their values were numbered from `first` on."""
    numbers = {value: place for place, value in enumerate(takes)}
    numbers |= {first + place: len(takes) + place for place in range(len(steps))}
    renamed = tuple(renumbered_step(step, numbers) for step in steps)
    return ProgramPart(len(takes), renamed, Tuple([Ref(numbers[value]) for value in gives]))


def _undo(step: ProgramStep, takes: Sequence[int]) -> tuple[ProgramPart, ...]:
    """How to take back what a step writes to its first argument."""
    numbers = {value: place for place, value in enumerate(takes)}
    arguments = [renumbered(argument, numbers) for argument in step.arguments]
    count, saved = len(takes), Ref(len(takes))
    indexed = _INDEX_ARGUMENTS.get(step.operator, 0)
    if not indexed or step.named or len(arguments) <= indexed:
        save = [ProgramStep("m:clone", arguments[:1])]
        restore = ProgramStep("m:copy_", [arguments[0], saved])
    else:
        save = [ProgramStep(_PARTLY[step.operator], arguments[:indexed])]
        if step.operator == _PERHAPS_VIEW:
            save.append(ProgramStep("m:clone", [Ref(count)]))
        restore = ProgramStep(step.operator, [*arguments[:indexed], saved])
    end = Ref(count + len(save) - 1)
    saving = ProgramPart(count, tuple(save), Tuple([end]))
    return saving, ProgramPart(count + 1, (restore,), Tuple([]))


class Uneven(Exception):
    """What calls have apart is not alike, so these steps cannot take it as one."""

    def __init__(self, segment: Segment, value: int) -> None:
        super().__init__(f"value {value}")
        self.segment = segment
        self.value = value


class WritesShared(Exception):
    """A step writes, for each call, to a value that the program makes once for all calls."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}")
        self.step = step


class StepFunctions(NamedTuple):
    """A segment, and the functions made of it."""

    segment: Segment
    run: Run
    undo: tuple[Run, ...]


class _Stacked:
    """Stands for a tensor of each call; the first dimension is the calls."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class StepRun:
    """One run. If it fails, `undo` leaves all tensors of the calls as they were."""

    def __init__(
        self, size: int, shared: dict[int, Any], sent: dict[int, list[Any]], own: dict[int, Any]
    ) -> None:
        """Values by number: `sent` tensors are stacked, `own` ones stay apart."""
        self._size = size
        self._shared = shared
        self._apart: dict[int, list[Any]] = own
        self._stacked: dict[int, Any] = {}
        self._gathered: dict[int, Any] = {}
        self._copies: list[tuple[torch.Tensor, int]] = []  # nothing may be written to these
        self._written: list[tuple[Run, list[Any]]] = []
        for value, tensors in sent.items():
            self._stacked[value] = _Stacked(self._copy(torch.stack(tensors)))

    def run(self, plan: Sequence[StepFunctions]) -> None:
        for step in plan:
            self._segment(step)
        self._check_copies()

    def watch(self, plan: Sequence[StepFunctions]) -> set[int]:
        """Run all step by step: the numbers of the steps that write to what is a call's own."""
        writes = set()
        for step in plan:
            segment = step.segment
            own = self._apart.keys() & {*segment.takes}
            before = self._look(segment) if segment.apart else []
            copies = len(self._copies)
            try:
                self._segment(step)
            except RuntimeError as error:
                target = _target(segment)
                if segment.apart or target not in self._shared or not writes_to_shared(error):
                    raise
                raise WritesShared(segment.numbers[0]) from error
            if any(_version(copy) != version for copy, version in self._copies[copies:]):
                raise Uneven(segment, segment.takes[0])  # it writes to what is each call's own
            if segment.apart and _wrote(segment, own, before):
                writes |= {*segment.numbers}
        self._check_copies()
        return writes

    def undo(self) -> None:
        while self._written:
            restore, given = self._written.pop()
            restore(given, ())

    def outputs(self, leaves: Sequence[Any], layouts: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Each call's outputs: `leaves` are numbers of values in a list of one, or values."""
        if len(leaves) != len(layouts):
            raise CannotMerge(Singly.DIFFERS)
        columns = [
            self._output(leaf[0], layout) if isinstance(leaf, list) else [leaf] * self._size
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]
        return _in_memory_of_their_own(list(zip(*columns, strict=True)))

    # -- segments -------------------------------------------------------------------------------

    def _segment(self, step: StepFunctions) -> None:
        if step.segment.apart:
            self._for_each(step)
        else:
            self._for_all(step)
        for value in step.segment.drops:
            for values in (self._shared, self._stacked, self._apart, self._gathered):
                values.pop(value, None)

    def _for_all(self, step: StepFunctions) -> None:
        segment = step.segment
        given = [self._for_all_of(segment, value) for value in segment.takes]
        if not any(map(_has_stacked, given)):
            self._shared.update(zip(segment.gives, step.run(given, ()), strict=True))
            return
        with _level(self._size) as level:
            entered = [
                _changed(value, _Stacked, lambda it: _functorch._add_batch_dim(it.tensor, 0, level))  # noqa: SLF001 - as torch's own vmap
                for value in given
            ]
            found = step.run(entered, ())
            left = [_changed(each, torch.Tensor, lambda it: _left(it, level)) for each in found]
        for number, value in zip(segment.gives, left, strict=True):
            (self._stacked if _has_stacked(value) else self._shared)[number] = value

    def _for_all_of(self, segment: Segment, value: int) -> Any:
        if value in self._apart:
            if value not in self._gathered:
                try:
                    self._gathered[value] = self._gather(self._apart[value])
                except _Unlike:
                    raise Uneven(segment, value) from None
            return self._gathered[value]
        return self._stacked[value] if value in self._stacked else self._shared[value]

    def _for_each(self, step: StepFunctions) -> None:
        segment = step.segment
        columns = [self._for_each_of(value) for value in segment.takes]
        found = []
        for number in range(self._size):
            given = [column[number] for column in columns]
            if step.undo:
                save, restore = step.undo
                self._written.append((restore, [*given, *save(given, ())]))
            found.append(step.run(given, ()))
        if step.undo:
            self._gathered.clear()
        for place, value in enumerate(segment.gives):
            self._apart[value] = [each[place] for each in found]

    def _for_each_of(self, value: int) -> list[Any]:
        if value in self._apart:
            return self._apart[value]
        if value in self._stacked:
            return _split(self._stacked[value], self._size)
        return [self._shared[value]] * self._size

    def _gather(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            if any(
                not isinstance(each, torch.Tensor)
                or each.shape != first.shape
                or each.dtype != first.dtype
                for each in values
            ):
                raise _Unlike
            return _Stacked(self._copy(torch.stack(list(values))))
        if any(type(each) is not type(first) for each in values):
            raise _Unlike
        if isinstance(first, (tuple, list)):
            if len(set(map(len, values))) > 1:
                raise _Unlike
            return type(first)([self._gather(column) for column in zip(*values, strict=True)])
        if any(repr(each) != repr(first) for each in values):
            raise _Unlike
        return first

    def _copy(self, copy: torch.Tensor) -> torch.Tensor:
        self._copies.append((copy, _version(copy)))
        return copy

    def _check_copies(self) -> None:
        """A program that writes to a copy should have written to the calls' own tensors."""
        if any(_version(copy) != version for copy, version in self._copies):
            raise CannotMerge(Singly.WRITES)

    # -- watching -------------------------------------------------------------------------------

    def _look(self, segment: Segment) -> list[tuple[int, torch.Tensor, tuple[Any, ...]]]:
        for value in segment.takes:  # nothing may be written to what all have
            self._copies += [(each, _version(each)) for each in _tensors(self._shared.get(value))]
        return [
            (value, tensor, _state(tensor))
            for value, column in [(value, self._for_each_of(value)) for value in segment.takes]
            for each in column
            for tensor in _tensors(each)
        ]

    # -- outputs --------------------------------------------------------------------------------

    def _output(self, value: int, layout: Any) -> list[Any]:
        if value in self._stacked:
            return _laid_out(self._stacked[value], layout)
        found = self._for_each_of(value)
        for each in found:
            if isinstance(each, torch.Tensor) != isinstance(layout, Layout):
                raise CannotMerge(Singly.DIFFERS)
        return found


def _wrote(
    segment: Segment,
    own: AbstractSet[int],
    before: Sequence[tuple[int, torch.Tensor, tuple[Any, ...]]],
) -> bool:
    """Whether the step wrote, which it may to its first argument alone."""
    wrote = [(value, tensor) for value, tensor, state in before if _version(tensor) != state[0]]
    if not wrote:
        return False
    target = _target(segment)
    # The versions of other views of the same memory rise as well.
    storages = {identity(each.untyped_storage()) for value, each in wrote if value == target}
    others = {identity(tensor.untyped_storage()) for _, tensor in wrote} - storages
    reshaped = any(_state(tensor)[1:] != state[1:] for _, tensor, state in before)
    if target not in own or others or reshaped:
        raise CannotMerge(Singly.WRITES)
    return True


def _target(segment: Segment) -> int | None:
    first, *_ = (*segment.steps.steps[0].arguments, None)
    return segment.takes[first.number] if isinstance(first, Ref) else None


class _Unlike(Exception):
    """Values that cannot be one."""


@contextmanager
def _level(size: int) -> Iterator[int]:
    level = _functorch._vmap_increment_nesting(size, "error")  # noqa: SLF001 - as torch's own vmap
    try:
        yield level
    finally:
        _functorch._vmap_decrement_nesting()  # noqa: SLF001 - as above


def _left(tensor: torch.Tensor, level: int) -> Any:
    found, place = _functorch._unwrap_batched(tensor, level)  # noqa: SLF001 - as above
    if place is None:
        return found
    return _Stacked(found.movedim(place, 0) if place else found)


def _changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_changed(item, kind, change) for item in value])
    return value


def _has_stacked(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_stacked, value))
    return isinstance(value, _Stacked)


def _split(value: Any, size: int) -> list[Any]:
    if isinstance(value, _Stacked):
        return list(value.tensor.unbind(0))
    if isinstance(value, (tuple, list)):
        columns = zip(*(_split(item, size) for item in value), strict=True)
        return [type(value)(each) for each in columns]
    return [value] * size


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _version(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001 - the counter autograd goes by


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _version(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()


def _laid_out(value: Any, layout: Any) -> list[Any]:
    """The calls' parts of an output, each in memory of its own, laid out as a single call's."""
    if not isinstance(value, _Stacked) or not isinstance(layout, Layout):
        raise CannotMerge(Singly.DIFFERS)
    whole = value.tensor.detach().resolve_conj().resolve_neg()
    if whole.dtype != layout.dtype or whole.dim() != 1 + len(layout.shape):
        raise CannotMerge(Singly.DIFFERS)
    # Of another shape than the output that was looked at, contiguous is as good as any.
    strides = layout.strides if tuple(whole.shape[1:]) == layout.shape else None
    return [as_laid_out(piece, strides) for piece in whole.unbind(0)]


def _in_memory_of_their_own(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The outputs, copied where two calls would have the same memory."""
    owners: dict[int, set[int]] = {}
    for number, outputs in enumerate(calls):
        for tensor in _tensors(outputs):
            owners.setdefault(identity(tensor.untyped_storage()), set()).add(number)

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        several = len(owners[identity(tensor.untyped_storage())]) > 1
        return tensor.clone() if several else tensor

    return [_changed(outputs, torch.Tensor, apart) for outputs in calls]
