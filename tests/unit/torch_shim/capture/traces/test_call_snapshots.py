"""A snapshot of a call's arguments stays as it was, whatever the caller does with its own."""

import abc
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_shim.capture.traces.snapshots import is_plain, snapshot


class Layer(abc.ABC):  # noqa: B024 - abstract as those of the caches that people use
    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def grow(self) -> None:
        self.layers.append(Layer())
        self.layers[0].keys = torch.ones(len(self.layers))


@dataclass
class Options:
    names: list[str] = field(default_factory=list)
    scale: float = 1.0


class Pair(OrderedDict[str, Any]):
    """A dictionary with attributes, as the outputs of transformers are."""

    note: list[int]


def copied(value: Any) -> Any:
    return snapshot(torch.nn.Linear(1, 1), (value,), {})[0][0]


def test_growing_cache_does_not_grow_in_a_snapshot() -> None:
    cache = Cache()
    cache.grow()
    copy = copied(cache)
    keys = cache.layers[0].keys
    cache.grow()
    assert type(copy) is Cache
    assert len(copy.layers) == 1
    assert copy.layers[0].keys is keys


def test_containers_are_copied_and_tensors_are_not() -> None:
    tensor = torch.ones(2)
    pair = Pair(first=tensor)
    pair.note = [1]
    value = {"list": [tensor, [1]], "deque": deque([1], 3), "set": {1}, "tuple": ([2], 3)}
    value |= {"default": defaultdict(list, a=[1]), "options": Options(["a"]), "pair": pair}
    copy = copied(value)
    value["list"].append(2)  # type: ignore[attr-defined]  # a list
    value["list"][1].append(2)  # type: ignore[index]  # as above
    value["tuple"][0].append(2)  # type: ignore[index]  # a tuple
    value["options"].names.append("b")  # type: ignore[attr-defined]  # as made above
    value["deque"].append(2)  # type: ignore[attr-defined]  # a deque
    pair.note.append(2)
    pair["second"] = 2
    assert copy["list"] == [tensor, [1]]
    assert copy["list"][0] is tensor
    assert copy["tuple"] == ([2], 3)
    assert (copy["deque"], copy["deque"].maxlen) == (deque([1]), 3)
    assert copy["default"] == {"a": [1]}
    assert copy["options"] == Options(["a"])
    assert (type(copy["pair"]), list(copy["pair"]), copy["pair"].note) == (Pair, ["first"], [1])


def test_one_object_stays_one_object_in_a_snapshot() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    args, kwargs = snapshot(torch.nn.Linear(1, 1), (shared, [shared]), {"also": shared})
    assert args[0] is not shared
    assert args[1][0] is args[0] is kwargs["also"]


def test_what_the_module_holds_is_not_copied() -> None:
    class Holder(torch.nn.Linear):
        state: object = None

    part = Holder(1, 1)
    module = torch.nn.Sequential(part)
    cache = Cache()
    cache.grow()
    part.state = {"cache": cache}
    args, _ = snapshot(module, (cache, [cache.layers]), {})
    assert args[0] is cache
    assert args[1][0] is cache.layers


def test_objects_that_cannot_be_made_empty_are_not_copied() -> None:
    class Slotted:
        __slots__ = ("value",)

    class Made:
        def __new__(cls) -> "Made":
            return super().__new__(cls)

    for value in (Slotted(), Made(), torch.Generator(), len, Cache, ValueError("no")):
        assert copied([value])[0] is value


def test_calls_with_tensors_and_numbers_are_plain() -> None:
    assert is_plain((torch.ones(1), 2, None), {"scale": 0.5, "name": "a"})
    assert not is_plain(([torch.ones(1)],), {})
    assert not is_plain((), {"cache": Cache()})
