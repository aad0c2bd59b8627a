"""How a value that is put is described: its structure, and where the bytes of its leaves lie.

A value is a tensor, bytes, text, a number, a boolean or None, or a list, tuple or dictionary of
values. Only functions of one tenant read descriptions, which are bounded before they are parsed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import torch

from torch_shim.errors import BadFrame, UnsuitableData
from torch_shim.remote.inputs import NAME_OF
from torch_shim.tensors.handles import CudaTensor
from torch_shim.wire.bounded_msgpack import MessageBounds, shown, unpack_bounded
from torch_shim.wire.protocol import MOST_ABOUT_BYTES, places_behind
from torch_shim.wire.shared_memory import layout_of, span_of

_VERSION = 1
_MOST_LEAVES = 1024
_MOST_DEPTH = 32
_BOUNDS = MessageBounds(1 << 14, 1 << 13)
_DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}
_BYTES, _TENSOR, _LIST, _TUPLE, _DICT = "b", "t", "l", "u", "d"
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
# Make a value of a leaf's bytes.
MakeTensor = Callable[[Place, TensorLayout], torch.Tensor]
MakeBytes = Callable[[Place], memoryview]


class Describer:
    """Describes one value. `stays` says of a tensor where its bytes are if they are not sent."""

    def __init__(self, stays: Callable[[torch.Tensor], PartLeaf | None]) -> None:
        self._stays = stays
        self._leaves: list[Leaf | PartLeaf] = []
        self._tree: Any = None
        self.file_leaves: list[tuple[int, Leaf]] = []
        self.parts: list[str] = []
        self.size_bytes = 0

    def describe(self, value: Any) -> bytes:
        """Return the description; the value's leaves and their places are known from then on."""
        self._tree = self._node(value, 0)
        sizes = [_size_of(leaf) for leaf in self._leaves if not isinstance(leaf, PartLeaf)]
        starts, self.size_bytes = places_behind(0, sizes)
        places: list[list[Any]] = []
        free = iter(starts)
        for leaf in self._leaves:
            if isinstance(leaf, PartLeaf):
                self.parts.append(leaf.handle)
                places.append([leaf.handle, leaf.size_bytes])
            else:
                start = next(free)
                self.file_leaves.append((start, leaf))
                places.append([start, _size_of(leaf)])
        about: bytes = msgpack.packb([_VERSION, places, self._tree], use_bin_type=True)
        if len(about) > MOST_ABOUT_BYTES:
            raise UnsuitableData(f"its structure takes {len(about)} bytes, not {MOST_ABOUT_BYTES}")
        return about

    def _node(self, value: Any, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise UnsuitableData(f"it is nested more than {_MOST_DEPTH} deep")
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int):
            if value not in _INTEGERS:
                raise UnsuitableData("it has a number of more than 64 bits")
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return [_BYTES, self._leaf(memoryview(value).cast("B"))]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            kind = _LIST if isinstance(value, list) else _TUPLE
            return [kind, [self._node(item, depth + 1) for item in value]]
        if isinstance(value, dict):
            return [_DICT, [self._entry(key, item, depth) for key, item in value.items()]]
        raise UnsuitableData(f"it has a {type(value).__qualname__}")

    def _entry(self, key: Any, value: Any, depth: int) -> list[Any]:
        if not isinstance(key, str | int):
            raise UnsuitableData(f"it has a key that is a {type(key).__qualname__}")
        return [key, self._node(value, depth + 1)]

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
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
        return [_TENSOR, number, NAME_OF[tensor.dtype], shape, strides, offset, on_gpu]

    def _leaf(self, leaf: Leaf | PartLeaf) -> int:
        if len(self._leaves) >= _MOST_LEAVES:
            raise UnsuitableData(f"it has more than {_MOST_LEAVES} tensors and byte strings")
        self._leaves.append(leaf)
        return len(self._leaves) - 1


class DescribedValue:
    """A description that was read and checked; BadFrame for what fits nothing."""

    def __init__(self, about: bytes, size_bytes: int) -> None:
        """The file of the data has this size."""
        match unpack_bounded(about, _BOUNDS):
            case [int(version), list(places), tree] if version == _VERSION:
                self._tree = tree
                self._places = [_place(place, size_bytes) for place in places]
            case _:
                raise BadFrame("data with a description of unknown shape")

    def build(self, tensor: MakeTensor, content: MakeBytes) -> Any:
        return self._value(self._tree, tensor, content, 0)

    def _value(self, node: Any, tensor: MakeTensor, content: MakeBytes, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise BadFrame("data that is nested too deeply")
        if not isinstance(node, list):
            if node is None or isinstance(node, bool | int | float | str):
                return node
            raise BadFrame(f"data with {shown(node)}")
        match node:
            case [str(kind), list(items)] if kind in (_LIST, _TUPLE):
                made = [self._value(item, tensor, content, depth + 1) for item in items]
                return made if kind == _LIST else tuple(made)
            case [str(kind), list(items)] if kind == _DICT:
                entries = [_entry(item) for item in items]
                return {key: self._value(item, tensor, content, depth + 1) for key, item in entries}
            case [str(kind), int(number)] if kind == _BYTES:
                return content(self._place(number))
            case [str(kind), int(number), *layout] if kind == _TENSOR:
                place = self._place(number)
                return tensor(place, _layout(layout, place.size_bytes))
            case _:
                raise BadFrame(f"data with {shown(node)}")

    def _place(self, number: int) -> Place:
        if not 0 <= number < len(self._places):
            raise BadFrame(f"data with leaf {number} of {len(self._places)}")
        return self._places[number]


def pack_tensor(layout: TensorLayout, size_bytes: int) -> bytes:
    """Describe one tensor over data that is one storage of this size."""
    name = NAME_OF[layout.dtype]
    node = [_TENSOR, 0, name, layout.shape, layout.strides, layout.offset, layout.on_gpu]
    packed: bytes = msgpack.packb([_VERSION, [[0, size_bytes]], node], use_bin_type=True)
    return packed


def _place(place: Any, size_bytes: int) -> Place:
    match place:
        case [int(start), int(size)] if start >= 0 <= size and start + size <= size_bytes:
            return FileLeaf(start, size)
        case [str(handle), int(size)] if size >= 0:
            return PartLeaf(handle, size)
        case _:
            raise BadFrame(f"data with a leaf at {shown(place)}")


def _layout(fields: list[Any], size_bytes: int) -> TensorLayout:
    match fields:
        case [str(name), list(shape), list(strides), int(offset), bool(on_gpu)]:
            numbers = [offset, *shape, *strides]
            if {type(number) for number in numbers} == {int} and min(numbers) >= 0:
                dtype = _DTYPE_OF.get(name)
                if dtype is not None and len(shape) == len(strides):
                    layout = TensorLayout(dtype, shape, strides, offset, on_gpu)
                    if layout.end_bytes <= size_bytes:
                        return layout
        case _:
            pass
    raise BadFrame(f"data with a tensor {shown(fields)}")


def _entry(item: Any) -> tuple[str | int, Any]:
    match item:
        case [str(key) | int(key), value]:
            return key, value
        case _:
            raise BadFrame(f"data with an entry {shown(item)}")


def _size_of(leaf: Leaf) -> int:
    return leaf.nbytes if isinstance(leaf, memoryview) else leaf.numel() * leaf.element_size()


def _contiguous(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
