"""Which steps of a program run once for several calls, and which once for each of them.

What is each call's own (a cache that stays in the worker, of whatever length) stays apart: steps
that touch it run for each call, on its own tensors. Where such a result meets weights, the calls'
results are put together again. So what costs most, the weights, is read once for all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpu_manager.worker.program.build import references
from torch_shim.wire.programs import Mapping, Program, ProgramPart, ProgramStep, Ref, Slice, Tuple

# How a step that overwrites a part of a tensor would read that part before, by its operator; any
# other one overwrites all of its first argument.
_PARTLY = {"m:index_copy_": "m:index_select", "o:setitem": "o:getitem"}
_INDEX_ARGUMENTS = {"m:index_copy_": 3, "o:setitem": 2}  # and the tensor itself
_PERHAPS_VIEW = "o:setitem"  # what is read there may be no copy


@dataclass
class KnownSteps:
    """What was found out about a program: it only grows."""

    inputs: set[int] = field(default_factory=set)  # that are each call's own
    written: set[int] = field(default_factory=set)  # of these: inputs that the program writes to
    steps: set[int] = field(default_factory=set)  # that run apart although they touch weights
    writes: set[int] = field(default_factory=set)  # steps that write to their first argument
    made: set[int] = field(default_factory=set)  # steps that make, of nothing, what is written to

    @property
    def any_own(self) -> bool:
        """Whether calls have anything apart."""
        return bool(self.inputs or self.made)


class Undo(NamedTuple):
    """How a step's write is undone; both take the step's tensors and numbers in the same order.

    `save` gives a copy of what the step overwrites, `restore` takes that copy behind the others.
    """

    save: ProgramPart
    restore: ProgramPart


class Segment(NamedTuple):
    """Steps one after the other that run together, or apart.

    `takes` and `gives` are the numbers of values; those of `drops` are needed no more afterwards.
    """

    apart: bool
    numbers: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    steps: ProgramPart
    undo: Undo | None


def plan_steps(
    program: Program, known: KnownSteps, weights: Iterable[int], *, one_by_one: bool = False
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
        undo = _undo(steps[0], takes) if numbers[0] in known.writes else None
        part = _part(steps, takes, first + numbers[0], gives)
        segments.append(Segment(apart[end], tuple(numbers), takes, gives, drops, part, undo))
    return segments


def users_of(program: Program, numbers: Sequence[int], value: int) -> set[int]:
    """Which of these steps take the value."""
    return {number for number in numbers if value in references(_parts(program.steps[number]))}


def makers_of(program: Program, value: int) -> set[int]:
    """The steps that a value comes from, the first ones among them."""
    first = program.inputs + len(program.constants)
    found: set[int] = set()
    values = [value]
    while values:
        number = values.pop() - first
        if number >= 0 and number not in found:
            found.add(number)
            values += references(_parts(program.steps[number]))
    return found


def made_for(program: Program, writer: int) -> set[int]:
    """The steps that make what this step writes to, of nothing that is sent.

    And those that make what others like it write to, so that one look finds the caches of all
    layers.
    """
    first = program.inputs + len(program.constants)
    found: set[int] = set()
    for number, step in enumerate(program.steps):
        target, *_ = (*step.arguments, None)
        if step.operator == program.steps[writer].operator and isinstance(target, Ref):
            makers = makers_of(program, target.number)
            used = [value for each in makers for value in references(_parts(program.steps[each]))]
            if number == writer or all(value >= first for value in used):
                found |= makers
    return found


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
    program: Program, uses: Sequence[Sequence[int]], known: KnownSteps, shared: set[int]
) -> list[bool]:
    """Which steps run apart."""
    first = program.inputs + len(program.constants)
    own, found = set(known.inputs), []
    for number, used in enumerate(uses):
        meets_weights = not shared.isdisjoint(used)
        forced = number in known.steps or number in known.writes
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
    renamed = tuple(
        ProgramStep(
            step.operator,
            [_renumbered(argument, numbers) for argument in step.arguments],
            {name: _renumbered(value, numbers) for name, value in step.named.items()},
        )
        for step in steps
    )
    return ProgramPart(len(takes), renamed, Tuple([Ref(numbers[value]) for value in gives]))


def _undo(step: ProgramStep, takes: Sequence[int]) -> Undo:
    """How to take back what a step writes to its first argument."""
    numbers = {value: place for place, value in enumerate(takes)}
    arguments = [_renumbered(argument, numbers) for argument in step.arguments]
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
    return Undo(
        ProgramPart(count, tuple(save), Tuple([end])),
        ProgramPart(count + 1, (restore,), Tuple([])),
    )


def _renumbered(value: Any, numbers: dict[int, int]) -> Any:
    if isinstance(value, Ref):
        return Ref(numbers[value.number])
    if isinstance(value, list):
        return [_renumbered(item, numbers) for item in value]
    if isinstance(value, (Tuple, Mapping)):
        return type(value)([_renumbered(item, numbers) for item in value.items])
    if isinstance(value, Slice):
        return Slice(*(_renumbered(part, numbers) for part in value))
    return value
