"""Descriptions of values that are put: what can be, and what a reader believes."""

from typing import Any

import pytest
import torch
from msgspec import msgpack

from tests.kit.outcomes import instead_of, outcome
from torch_shim.data.put_and_get import (
    DescribedValue,
    Describer,
    FileLeaf,
    PartLeaf,
    Place,
    pack_tensor,
)
from torch_shim.errors import BadFrame, UnsuitableData
from torch_shim.remote.values import OutputView
from torch_shim.tensors.handles import CudaTensor, become_cuda


def there_and_back(value: Any, stays: Any = lambda _: None) -> Any:
    """A value that was described, written, read and made again."""
    describer = Describer(stays)
    about = describer.describe(value)
    room = bytearray(max(describer.size_bytes, 1))
    for start, leaf in describer.file_leaves:
        if isinstance(leaf, memoryview):
            room[start : start + len(leaf)] = leaf
        else:
            raw = torch.Tensor.numpy(leaf.as_subclass(torch.Tensor).contiguous()).tobytes()
            room[start : start + len(raw)] = raw

    def tensor(place: Place, layout: OutputView, on_gpu: bool) -> torch.Tensor:  # noqa: FBT001 - as in its description
        assert isinstance(place, FileLeaf)
        whole = torch.frombuffer(room, dtype=torch.uint8)[place.start :][: place.size_bytes]
        made = torch.empty(0, dtype=layout.dtype).set_(
            whole.clone().untyped_storage(), layout.offset, layout.shape, layout.strides
        )
        return become_cuda(made) if on_gpu else made

    def content(place: Place) -> memoryview:
        assert isinstance(place, FileLeaf)
        return memoryview(room)[place.start : place.start + place.size_bytes]

    return DescribedValue(about, describer.size_bytes).build(tensor, content)


def test_values_come_back_as_they_were() -> None:
    values: tuple[Any, ...] = (
        *(None, True, 0, -(1 << 63), (1 << 64) - 1, 2.5, "text", "", [], (), {}),
        [1, (2.0, [None, {"a": (True,)}]), "ä" * 2000],
        {"x": 1, 2: "y", True: "z"},
    )
    wrong = []
    for value in values:
        found = outcome(there_and_back, value)
        if found != value or type(found) is not type(value):
            wrong.append((value, found))
    assert wrong == []


def test_bytes_and_tensors_come_back_beside_each_other() -> None:
    tensors = {
        "floats": torch.randn(3, 5),
        "halves": torch.randn(7).half(),
        "none": torch.empty(0, 4),
        "one": torch.tensor(5),
        "turned": torch.arange(12).reshape(3, 4).t(),
        "part": torch.arange(100)[10:20:3],
    }
    found = there_and_back({"bytes": b"abc", "empty": bytearray(), "tensors": tensors})
    assert bytes(found["bytes"]) == b"abc"
    assert len(found["empty"]) == 0
    for name, tensor in tensors.items():
        assert torch.equal(found["tensors"][name], tensor), name
        assert type(found["tensors"][name]) is torch.Tensor


def test_handle_comes_back_as_a_handle() -> None:
    found = there_and_back([become_cuda(torch.arange(4.0)), torch.arange(4.0)])
    assert [type(each) for each in found] == [CudaTensor, torch.Tensor]
    assert found[0].tolist() == found[1].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_tensor_that_stays_elsewhere_is_named_and_not_sent() -> None:
    part = PartLeaf("node." + "p" * 32, 64)
    describer = Describer(lambda tensor: part if tensor.numel() == 16 else None)
    about = describer.describe([torch.zeros(16), torch.zeros(4)])
    assert describer.parts == [part.handle]
    assert describer.size_bytes == 64  # of the second, aligned
    places: list[Place] = []

    def tensor(place: Place, *_: object) -> torch.Tensor:
        places.append(place)
        return torch.zeros(1)

    DescribedValue(about, describer.size_bytes).build(tensor, lambda _: memoryview(b""))
    assert places == [part, FileLeaf(0, 16)]


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "has a object"),
        ({1.5: 1}, "a key that is a float"),
        (1 << 64, "more than 64 bits"),
        (deep(40), "nested more than 32 deep"),
        ([b""] * 1025, "more than 1024 tensors"),
        ("x" * 70_000, "its structure takes"),
        (torch.zeros(3).to_sparse(), "torch.sparse_coo"),
        (torch.empty(3, device="meta"), "a tensor on meta"),
    ],
)
def test_value_is_refused_when(value: Any, words: str) -> None:
    with pytest.raises(UnsuitableData, match=words):
        Describer(lambda _: None).describe(value)


def described(*changes: Any, on_gpu: Any = True) -> bytes:
    """One tensor over a leaf of 16 bytes, the last fields of which are these."""
    good = [0, "float32", [4], [1], 0]
    return msgpack.encode([1, [[0, 16]], ["t", [*good[: 5 - len(changes)], *changes], on_gpu]])


WRONG_DESCRIPTIONS = (
    b"",
    b"\xc1",
    msgpack.encode([2, [], None]),
    msgpack.encode([1, [[0, 17]], None]),
    msgpack.encode([1, [[-1, 4]], None]),
    msgpack.encode([1, [["node", -4]], None]),
    msgpack.encode([1, [[0, 16]], ["x", 0]]),
    msgpack.encode([1, [[0, 16]], ["b", 1]]),
    msgpack.encode([1, [[0, 16]], ["b", -1]]),
    described("nonsense", [4], [1], 0),
    described([5], [1], 0),
    described([4, 4], [1], 0),
    described([4], [1 << 62], 0),
    described(-1),
    described(1),
    described(on_gpu=1),
    msgpack.encode([1, [[0, 16]], ["d", [["k"]]]]),
    msgpack.encode([1, [], ["l", [["l", [b"bytes"], False]], False]]),
    msgpack.encode([1, [], [[]]]),
)


def test_description_is_refused_when_it_fits_nothing() -> None:
    def build(about: bytes) -> object:
        return DescribedValue(about, 16).build(lambda *_: torch.zeros(1), lambda _: memoryview(b""))

    wrong = [
        (about, taken)
        for about in WRONG_DESCRIPTIONS
        if (taken := instead_of(BadFrame, build, about))
    ]
    assert wrong == []


def test_one_tensor_is_described_as_it_lies() -> None:
    lies = torch.zeros(16).as_strided([2, 2], [1, 2], 3)
    seen: list[tuple[Place, OutputView, bool]] = []

    def tensor(*found: Any) -> torch.Tensor:
        seen.append(found)
        return torch.zeros(1)

    DescribedValue(pack_tensor(lies, 64), 64).build(tensor, lambda _: memoryview(b""))
    assert seen == [(FileLeaf(0, 64), OutputView(0, torch.float32, [2, 2], [1, 2], 3, 28), True)]
