"""A program run for several calls by a plan: some steps once for all, some once for each call.

A value is shared (the same for all calls), stacked (one tensor for all, its first dimension the
calls), or apart (a list of what each call has). Steps for all run under torch's vmap.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.merging.merge_records import Layout
from gpu_manager.worker.merging.merged_run import OtherOutputs, as_laid_out, writes_to_shared
from gpu_manager.worker.merging.step_plan import Segment
from gpu_manager.worker.program.tensor_specs import identity
from gpu_manager.worker.usage.counted_operators import Run
from torch_shim.wire.programs import Ref

_functorch = torch._C._functorch  # noqa: SLF001 - what torch's own vmap calls


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


class WritesElsewhere(Exception):
    """A step writes to what is not its call's own, or not to its first argument."""


class StepFunctions(NamedTuple):
    """A segment, and the functions made of it."""

    segment: Segment
    run: Run
    save: Run | None
    restore: Run | None


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
        """Run all segments."""
        for step in plan:
            self._segment(step)
        self._check_copies()

    def watch(self, plan: Sequence[StepFunctions]) -> set[int]:
        """The same, step by step: the numbers of the steps that write to what is a call's own."""
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
        """Take back what was written to the calls' own tensors."""
        while self._written:
            restore, given = self._written.pop()
            restore(given, ())

    def outputs(self, leaves: Sequence[Any], layouts: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Each call's outputs: `leaves` are numbers of values in a list of one, or values."""
        if len(leaves) != len(layouts):
            raise OtherOutputs
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
            if step.save is not None and step.restore is not None:
                self._written.append((step.restore, [*given, *step.save(given, ())]))
            found.append(step.run(given, ()))
        if step.save is not None:
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
        """What the calls have apart as one value."""
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
            raise WritesElsewhere

    # -- watching -------------------------------------------------------------------------------

    def _look(self, segment: Segment) -> list[tuple[int, torch.Tensor, tuple[Any, ...]]]:
        """The tensors that an apart step takes, and how they are now."""
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
                raise OtherOutputs
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
        raise WritesElsewhere
    return True


def _target(segment: Segment) -> int | None:
    """The number of the value that is the step's first argument, if it is one."""
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
    """The value with what is of this kind in it changed."""
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
    """Each call's part of a stacked value, as views."""
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
        raise OtherOutputs
    whole = value.tensor.detach().resolve_conj().resolve_neg()
    if whole.dtype != layout.dtype or whole.dim() != 1 + len(layout.shape):
        raise OtherOutputs
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
