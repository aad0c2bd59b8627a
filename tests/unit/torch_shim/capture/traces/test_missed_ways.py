"""Calls that look like one that missed are copied, a few times for each miss."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_shim.capture.root_calls import MissedWays

PROMPT, TOKEN = torch.ones(1, 12), torch.ones(1, 1)


def recurring(ways: MissedWays, *args: Any, **kwargs: Any) -> Iterator[None]:
    while ways.recurs(args, kwargs):
        yield


def test_nothing_is_copied_before_a_call_has_missed() -> None:
    assert not MissedWays().recurs((PROMPT, []), {})


def test_call_recurs_by_its_kinds_of_values_and_not_by_its_sizes() -> None:
    ways = MissedWays()
    ways.add((PROMPT, [1]), {"train": False, "cache": None})
    assert ways.recurs((torch.ones(1, 17), [1, 2]), {"train": False, "cache": None})
    assert not ways.recurs((TOKEN, [1]), {"train": False, "cache": None})
    assert not ways.recurs((PROMPT, [1]), {"train": True, "cache": None})
    assert not ways.recurs((PROMPT, [1]), {"train": False, "cache": {}})
    assert not ways.recurs((PROMPT, [1]), {"train": False})
    assert not ways.recurs((PROMPT.double(), [1]), {"train": False, "cache": None})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensor_without_one_shape_is_known_by_its_kind() -> None:
    ways = MissedWays()
    for layout in (torch.strided, torch.jagged):
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        ways.add((ragged, []), {})
        assert ways.recurs((ragged, []), {})


def test_way_that_is_traced_does_not_recur() -> None:
    ways = MissedWays()
    ways.add((PROMPT, []), {})
    ways.forget((PROMPT, []), {})
    assert not ways.recurs((PROMPT, []), {})


def test_copies_and_ways_are_bounded() -> None:
    ways = MissedWays()
    ways.add((PROMPT,), {})
    ways.add((TOKEN,), {})
    copies = len(list(recurring(ways, PROMPT)))
    assert 4 < copies < 64
    for number in range(100):
        ways.add((PROMPT,), {f"option{number}": 1})
    kept = [n for n in range(100) if ways.recurs((PROMPT,), {f"option{n}": 1})]
    assert kept == list(range(92, 100))
