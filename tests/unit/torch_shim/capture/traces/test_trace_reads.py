"""A trace knows whether something that it has read is different from what it read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kit.outcomes import outcome
from torch_shim.capture.traces.snapshots import TraceReads


class Holder:
    def __init__(self) -> None:
        self.flag = True
        self.items = [1, 2]


def changed(value: Any, change: Callable[[Any], object]) -> bool:
    reads = TraceReads()
    reads.note(value)
    assert not reads.have_changed()
    change(value)
    return reads.have_changed()


def toggle(holder: Any) -> None:
    holder.flag = False
    holder.flag = True


CHANGES: list[tuple[Any, Callable[[Any], object]]] = [
    ([1, 2], lambda value: value.append(3)),
    ([[1], 2], lambda value: value.__setitem__(0, [1])),
    ({"a": 1}, lambda value: value.update(a=2)),
    ({"a": 1}, lambda value: value.update(b=2)),
    ({"__builtins__": 1, "a": 1}, lambda value: value.update(b=2)),
    ({"__builtins__": 1, "a": 1}, lambda value: value.update(a=2)),
    ({1, 2}, lambda value: value.add(3)),
    (Holder(), toggle),  # as before, and read in between perhaps
    (Holder(), lambda value: setattr(value, "more", 1)),
    (torch.nn.Linear(2, 2), lambda value: value.train(mode=False)),
    (torch.nn.Linear(2, 2), lambda value: value.register_forward_hook(print)),
    (torch.nn.Linear(2, 2), lambda value: value.register_buffer("more", torch.ones(1))),
    (torch.nn.Linear(2, 2), lambda value: setattr(value, "weight", torch.nn.Parameter())),
    (torch.ones(2, 2), lambda value: value.resize_(3)),
    (torch.ones(2, 2), lambda value: value.unsqueeze_(0)),
    (torch.ones(2, 2), lambda value: value.t_()),
    (torch.ones(2, 2), lambda value: value.requires_grad_()),
    (torch.ones(2, 2), lambda value: setattr(value, "data", torch.ones(3))),
]


def test_changes_are_noticed() -> None:
    wrong = [
        (place, value, found)
        for place, (value, change) in enumerate(CHANGES)
        if (found := outcome(changed, value, change)) is not True
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.ones(2), lambda value: value.add_(1)),  # graphs get the content with every call
        ([1, 2], lambda value: value.sort()),
        (Holder(), lambda value: value.items.append(3)),  # noted when the trace reads the list
        (Holder, lambda value: setattr(value, "more", 1)),  # replaced methods are watched elsewhere
        ((1, 2), id),
        # Dynamo puts what it imports into the globals of the code that it traces.
        ({"__builtins__": 1, "a": 1}, lambda value: value.update(__import_torch=torch)),
    ],
)
def test_nothing_is_noticed_where_no_guard_could_differ(
    value: Any, change: Callable[[Any], object]
) -> None:
    assert not changed(value, change)
