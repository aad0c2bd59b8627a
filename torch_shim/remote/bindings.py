"""The bindings of a program: which of its inputs are a model's weights, for the models it ran."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_shim.remote.transfer import IMAGE, NAME_OF
from torch_shim.tensors import write_epochs
from torch_shim.weights.model_weights import ModelImage
from torch_shim.wire.protocol import MOST_BINDINGS

_numbers = itertools.count(1)


class Bindings:
    """The latest bindings of one program, which all models of one structure share.

    What is bound for a model lasts as long as the model's image, since it keeps the weights.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[ModelImage, list[Bound]] = WeakKeyDictionary()

    def find(self, args: Sequence[Any], model: ModelImage, never: frozenset[int]) -> "Bound":
        """Return the binding that holds for these arguments; the positions in `never` are free."""
        known = self._of.get(model, [])
        for bound in known:
            if bound.holds(args):
                return bound
        bound = Bound(args, model, never)
        self._of[model] = [bound, *known][:MOST_BINDINGS]
        return bound


class Bound:
    """The inputs of a graph that are a model's weights; valid until one of them is written to."""

    def __init__(self, args: Sequence[Any], model: ModelImage, never: frozenset[int]) -> None:
        self.number = next(_numbers)
        self.positions: list[int] = []
        self.tensors: dict[int, Any] = {}
        self._writes = write_epochs.writes
        marks = []
        for position, value in enumerate(args):
            described = None if position in never else _describe(value, model)
            if described is not None:
                self.positions.append(position)
                self.tensors[position] = described
                marks.append(write_epochs.marked(value))
        self._values = [args[position] for position in self.positions]
        self._versions = write_epochs.versions_of(self._values)
        self._marks = marks
        self._epochs = [mark.epoch for mark in marks]
        taken = set(self.positions)
        self.others = [position for position in range(len(args)) if position not in taken]

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether these arguments are the bound weights, and unchanged since binding."""
        values = [args[position] for position in self.positions]
        return all(map(operator.is_, values, self._values)) and self.unchanged()

    def given(self) -> list[tuple[int, torch.Tensor]]:
        """Return the bound weights, by their positions."""
        return list(zip(self.positions, self._values, strict=True))

    def unchanged(self) -> bool:
        """Whether the bound weights are what they were."""
        values = self._values
        if write_epochs.versions_of(values) != self._versions:
            return False
        if self._writes != write_epochs.writes:
            writes = write_epochs.writes
            marks = [write_epochs.marked(value) for value in values]
            if not all(map(operator.is_, marks, self._marks)):
                return False
            if [mark.epoch for mark in marks] != self._epochs:
                return False
            self._writes = writes
        return True


def _describe(value: Any, model: ModelImage) -> list[Any] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    mark = write_epochs.mark_of(value)
    place = (
        None
        if mark is None or mark.untracked
        else model.place_of(mark, write_epochs.version_of(value))
    )
    if place is None:
        return None
    source = [IMAGE, model.digest, place.offset, place.size_bytes]
    shape, strides = list(value.size()), list(value.stride())
    return [source, NAME_OF[value.dtype], shape, strides, value.storage_offset(), False]
