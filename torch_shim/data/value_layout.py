"""How a value that is put is described: its structure, and where the bytes of its leaves lie.

A value is a tensor, bytes, text, a number, a boolean or None, or a list, tuple or dictionary of
values. Only functions of one tenant read descriptions, which are bounded before they are parsed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Union

import torch
from msgspec import Struct, msgpack

from torch_shim.errors import BadFrame, UnsuitableData
from torch_shim.remote.inputs import NAME_OF
from torch_shim.tensors.handles import CudaTensor
from torch_shim.wire.messages import MOST_ABOUT_BYTES, Count, SentOutput
from torch_shim.wire.protocol import decoded, encode, places_behind
from torch_shim.wire.shared_memory import layout_of, span_of

_VERSION = 1
_MOST_LEAVES = 1024
_MOST_DEPTH = 32
_DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}
_INTEGERS = range(-(1 << 63), 1 << 64)

Leaf = torch.Tensor | memoryview


class TensorLayout(NamedTuple):
    """A tensor over the bytes of its leaf; strides and offset in elements."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    offset: int
    on_gpu: bool

    @property
    def end_bytes(self) -> int:
        """Where in the leaf its last element ends."""
        span = span_of(self.shape, self.strides)
        return (self.offset + span) * self.dtype.itemsize if span else 0


class FileLeaf(NamedTuple):
    """Bytes in the file of the data."""

    start: int
    size_bytes: int


class PartLeaf(NamedTuple):
    """Bytes that are data by themselves, and belong to this one."""

    handle: str
    size_bytes: int


Place = FileLeaf | PartLeaf


class _BytesNode(Struct, array_like=True, forbid_unknown_fields=True, tag="b"):
    leaf: Count


class _TensorNode(Struct, array_like=True, forbid_unknown_fields=True, tag="t"):
    tensor: SentOutput  # its source is the leaf
    on_gpu: bool


class _ListNode(Struct, array_like=True, forbid_unknown_fields=True, tag="l"):
    items: "list[_Node]"
    is_tuple: bool


class _DictNode(Struct, array_like=True, forbid_unknown_fields=True, tag="d"):
    entries: "list[tuple[str | int | bool, _Node]]"


_Node = Union[  # noqa: UP007 - a name of it stands in quotation marks above
    None, bool, int, float, str, _BytesNode, _TensorNode, _ListNode, _DictNode
]
# The version, for each leaf where it begins in the file or its handle, and its size, and the value.
_DESCRIPTION = msgpack.Decoder(tuple[int, list[tuple[Count | str, Count]], _Node])

# Make a value of a leaf's bytes.
MakeTensor = Callable[[Place, TensorLayout], torch.Tensor]
MakeBytes = Callable[[Place], memoryview]


class Describer:
    """Describes one value. `stays` says of a tensor where its bytes are if they are not sent."""

    def __init__(self, stays: Callable[[torch.Tensor], PartLeaf | None]) -> None:
        self._stays = stays
        self._leaves: list[Leaf | PartLeaf] = []
        self.file_leaves: list[tuple[int, Leaf]] = []
        self.parts: list[str] = []
        self.size_bytes = 0

    def describe(self, value: Any) -> bytes:
        """Return the description; the value's leaves and their places are known from then on."""
        tree = self._node(value, 0)
        sizes = [_size_of(leaf) for leaf in self._leaves if not isinstance(leaf, PartLeaf)]
        starts, self.size_bytes = places_behind(0, sizes)
        places: list[tuple[int | str, int]] = []
        free = iter(starts)
        for leaf in self._leaves:
            if isinstance(leaf, PartLeaf):
                self.parts.append(leaf.handle)
                places.append((leaf.handle, leaf.size_bytes))
            else:
                start = next(free)
                self.file_leaves.append((start, leaf))
                places.append((start, _size_of(leaf)))
        about = encode((_VERSION, places, tree))
        if len(about) > MOST_ABOUT_BYTES:
            raise UnsuitableData(f"its structure takes {len(about)} bytes, not {MOST_ABOUT_BYTES}")
        return about

    def _node(self, value: Any, depth: int) -> _Node:
        if depth > _MOST_DEPTH:
            raise UnsuitableData(f"it is nested more than {_MOST_DEPTH} deep")
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int):
            if value not in _INTEGERS:
                raise UnsuitableData("it has a number of more than 64 bits")
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return _BytesNode(self._leaf(memoryview(value).cast("B")))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            items = [self._node(item, depth + 1) for item in value]
            return _ListNode(items, isinstance(value, tuple))
        if isinstance(value, dict):
            return _DictNode([self._entry(key, item, depth) for key, item in value.items()])
        raise UnsuitableData(f"it has a {type(value).__qualname__}")

    def _entry(self, key: Any, value: Any, depth: int) -> tuple[str | int, _Node]:
        if not isinstance(key, str | int):
            raise UnsuitableData(f"it has a key that is a {type(key).__qualname__}")
        return key, self._node(value, depth + 1)

    def _tensor(self, tensor: torch.Tensor) -> _TensorNode:
        if tensor.layout is not torch.strided or tensor.dtype not in NAME_OF:
            raise UnsuitableData(f"it has a tensor of {tensor.layout}, {tensor.dtype}")
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsuitableData(f"it has a tensor on {tensor.device}")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        on_gpu = isinstance(tensor, CudaTensor)
        part = self._stays(tensor)
        if part is not None:
            _, shape, strides, offset = layout_of(tensor)
            number = self._leaf(part)
        else:
            shape, strides, offset = list(tensor.shape), _contiguous(tensor.shape), 0
            number = self._leaf(tensor)
        sent = SentOutput(number, NAME_OF[tensor.dtype], shape, strides, offset)
        return _TensorNode(sent, on_gpu)

    def _leaf(self, leaf: Leaf | PartLeaf) -> int:
        if len(self._leaves) >= _MOST_LEAVES:
            raise UnsuitableData(f"it has more than {_MOST_LEAVES} tensors and byte strings")
        self._leaves.append(leaf)
        return len(self._leaves) - 1


class DescribedValue:
    """A description that was read and checked; BadFrame for what fits nothing."""

    def __init__(self, about: bytes, size_bytes: int) -> None:
        """The file of the data has this size."""
        if len(about) > MOST_ABOUT_BYTES:
            raise BadFrame(f"data with a description of {len(about)} bytes")
        version, places, self._tree = decoded(_DESCRIPTION, about, "data")
        if version != _VERSION:
            raise BadFrame(f"data with a description of version {version}")
        self._places = [_place(start, size, size_bytes) for start, size in places]

    def build(self, tensor: MakeTensor, content: MakeBytes) -> Any:
        return self._value(self._tree, tensor, content, 0)

    def _value(self, node: _Node, tensor: MakeTensor, content: MakeBytes, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise BadFrame("data that is nested too deeply")
        match node:
            case _ListNode(items, is_tuple):
                made = [self._value(item, tensor, content, depth + 1) for item in items]
                return tuple(made) if is_tuple else made
            case _DictNode(entries):
                return {key: self._value(item, tensor, content, depth + 1) for key, item in entries}
            case _BytesNode(leaf):
                return content(self._place(leaf))
            case _TensorNode(sent, on_gpu):
                place = self._place(sent.source)
                return tensor(place, _layout(sent, place.size_bytes, on_gpu=on_gpu))
            case _:
                return node

    def _place(self, number: int) -> Place:
        if not 0 <= number < len(self._places):
            raise BadFrame(f"data with leaf {number} of {len(self._places)}")
        return self._places[number]


def pack_tensor(layout: TensorLayout, size_bytes: int) -> bytes:
    """Describe one tensor over data that is one storage of this size."""
    dtype, shape, strides, offset, on_gpu = layout
    node = _TensorNode(SentOutput(0, NAME_OF[dtype], shape, strides, offset), on_gpu)
    return encode((_VERSION, [(0, size_bytes)], node))


def _place(start: int | str, leaf_bytes: int, size_bytes: int) -> Place:
    if isinstance(start, str):
        return PartLeaf(start, leaf_bytes)
    if start + leaf_bytes > size_bytes:
        raise BadFrame(f"data with a leaf of {leaf_bytes} bytes at {start} of {size_bytes}")
    return FileLeaf(start, leaf_bytes)


def _layout(sent: SentOutput, size_bytes: int, *, on_gpu: bool) -> TensorLayout:
    dtype = _DTYPE_OF.get(sent.dtype)
    if dtype is not None and len(sent.shape) == len(sent.strides):
        layout = TensorLayout(dtype, sent.shape, sent.strides, sent.offset, on_gpu)
        if layout.end_bytes <= size_bytes:
            return layout
    raise BadFrame(f"data with a tensor {sent!r:.200}")


def _size_of(leaf: Leaf) -> int:
    return leaf.nbytes if isinstance(leaf, memoryview) else leaf.numel() * leaf.element_size()


def _contiguous(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
