"""Arguments of operators as plain values: they are stored in a file, changed, and made tensors."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu_manager.worker.program.tensor_specs import DTYPES

_MOST_STORED = 64  # values of an integer tensor
_MOST_ELEMENTS = 1 << 14
_FORMATS = {
    str(found)[len("torch.") :]: found
    for found in (
        torch.contiguous_format,
        torch.channels_last,
        torch.channels_last_3d,
        torch.preserve_format,
    )
}
LAYOUTS = ("plain", "transposed", "stepped", "expanded", "overlapping", "behind")


class NotStorable(Exception):
    """An argument that no program could name."""


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """What a tensor is made of: its content follows from `content`, `values` or chance."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...] | None = None
    content: str = "random"
    layout: str = "plain"

    def make(self, chance: random.Random) -> torch.Tensor:
        """The tensor."""
        dtype = DTYPES[self.dtype]
        count = math.prod(self.shape)
        if not 0 <= count <= _MOST_ELEMENTS or any(size < 0 for size in self.shape):
            raise NotStorable(f"a tensor of shape {self.shape}")
        flat = torch.zeros(count, dtype=dtype)
        if self.values is not None:
            cycle = [self.values[n % len(self.values)] for n in range(count)] if self.values else []
            flat = torch.tensor(cycle, dtype=torch.int64).to(dtype) if cycle else flat
        elif self.content == "random":
            flat = _random(count, dtype, chance)
        else:
            flat = torch.full((count,), float(self.content)).to(dtype)
        return _laid_out(flat.view(self.shape), self.layout)


def _random(count: int, dtype: torch.dtype, chance: random.Random) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([chance.random() < 0.5 for _ in range(count)], dtype=dtype)
    if dtype.is_complex or dtype.is_floating_point:
        numbers = torch.tensor([chance.gauss(0, 1) for _ in range(count)], dtype=torch.float64)
        return numbers.to(dtype)
    return torch.tensor([chance.randrange(4) for _ in range(count)], dtype=torch.int64).to(dtype)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "plain" or not tensor.dim() or not tensor.numel():
        return tensor
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "stepped":
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] * 2), dtype=tensor.dtype)
        return wide[..., ::2].copy_(tensor)
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    if layout == "behind":
        flat = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
        return flat[3:].copy_(tensor.reshape(-1)).view(tensor.shape)
    strides = [1] * tensor.dim()
    return tensor.reshape(-1).as_strided(tensor.shape, strides)


def stored(value: Any) -> Any:
    """An argument as JSON; NotStorable if a program could not name it."""
    if isinstance(value, torch.Tensor):
        return _stored_tensor(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple, torch.Size)):
        return [stored(item) for item in value]
    for kind, (name, parts) in _NAMED.items():
        if isinstance(value, kind):
            return {name: parts(value)}
    raise NotStorable(type(value).__name__)


_NAMED: dict[type, tuple[str, Callable[[Any], Any]]] = {
    complex: ("complex", lambda value: [value.real, value.imag]),
    slice: ("slice", lambda value: [value.start, value.stop, value.step]),
    torch.dtype: ("dtype", lambda value: str(value)[len("torch.") :]),
    torch.memory_format: ("format", lambda value: str(value)[len("torch.") :]),
    torch.device: ("device", lambda value: value.type),
    type(...): ("ellipsis", lambda _: True),
}


def _stored_tensor(tensor: torch.Tensor) -> Any:
    name = str(tensor.dtype)[len("torch.") :]
    if tensor.layout is not torch.strided or name not in DTYPES or tensor.numel() > _MOST_ELEMENTS:
        raise NotStorable("tensor")
    found: dict[str, Any] = {"tensor": name, "shape": list(tensor.shape)}
    integral = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if integral and tensor.numel() <= _MOST_STORED:
        found["values"] = [int(value) for value in tensor.reshape(-1).tolist()]
    return found


def restored(value: Any) -> Any:
    """What `stored` wrote, with tensors still to be made."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        values = value.get("values")
        shape = tuple(value["shape"])
        return TensorArgument(value["tensor"], shape, None if values is None else tuple(values))
    ((kind, content),) = value.items()
    return _KINDS[kind](content)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda parts: complex(*parts),
    "slice": lambda parts: slice(*parts),
    "dtype": lambda name: DTYPES.get(name, torch.float32),
    "format": _FORMATS.__getitem__,
    "device": torch.device,
    "ellipsis": lambda _: ...,
}


def made(value: Any, chance: random.Random) -> Any:
    """The argument itself."""
    if isinstance(value, TensorArgument):
        return value.make(chance)
    if isinstance(value, list):
        return [made(item, chance) for item in value]
    if isinstance(value, dict):
        return {name: made(item, chance) for name, item in value.items()}
    return value


# --- Changes ----------------------------------------------------------------------------------

_NUMBERS = (-1, 0, 1, 2, 3, 5, -2, -7, 64, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 33)
_MORE_NUMBERS = (1 << 45, (1 << 62) + 1, (1 << 63) - 1, -(1 << 63), -(1 << 62))
_FLOATS = (0.0, -1.0, 0.5, 1e30, -1e30, float("nan"), float("inf"), float("-inf"), 1e-40)
_DTYPES = (
    "float32 float64 int64 int32 uint8 int8 int16 bool float16 bfloat16 complex64".split()  # noqa: SIM905 - reads better
)
_WORDS = ("", "mean", "sum", "none", "constant", "reflect", "zeros", "bilinear", "amax", "x")
_SOME_TENSOR = TensorArgument("float32", (3,))
_CONTENTS = ("random", "nan", "inf", "-inf", "0", "-1", "1e30")


def changed(value: Any, chance: random.Random) -> Any:
    """The arguments with one thing in them changed."""
    places = list(_places(value))
    if not places:
        return value
    return _replaced(value, chance.choice(places), chance)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, list):
        if path:
            yield path
        for number, item in enumerate(value):
            yield from _places(item, (*path, number))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _places(item, (*path, name))
    else:
        yield path


def _replaced(value: Any, path: tuple[Any, ...], chance: random.Random) -> Any:
    if not path:
        return _other(value, chance)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], chance)
    return copy


def _other(value: Any, chance: random.Random) -> Any:
    change = _CHANGES.get(type(value))
    return value if change is None else change(value, chance)


def _other_list(value: list[Any], chance: random.Random) -> list[Any]:
    if not value or chance.random() < 0.2:
        return [*value, value[-1] if value else chance.choice(_NUMBERS)]
    where = chance.randrange(len(value))
    if chance.random() < 0.3:
        return value[:where] + value[where + 1 :]
    return [*value[:where], _other(value[where], chance), *value[where + 1 :]]


def _other_tensor(value: TensorArgument, chance: random.Random) -> TensorArgument:
    draw = chance.random()
    if value.values is not None and draw < 0.5:
        return replace(value, values=_other_values(value.values, chance))
    if draw < 0.7:
        return replace(value, shape=_other_shape(value.shape, chance))
    if draw < 0.8:
        return replace(value, layout=chance.choice(LAYOUTS))
    if draw < 0.9:
        values = value.values if value.values is not None else None
        return replace(value, dtype=chance.choice(_DTYPES), values=values)
    return replace(value, content=chance.choice(_CONTENTS), values=None)


def _other_values(values: tuple[Any, ...], chance: random.Random) -> tuple[Any, ...]:
    far = chance.choice([*_NUMBERS, *_MORE_NUMBERS, 4, 6, 7, 8, 9, 10, 20, 100, -3, -5])
    if not values or chance.random() < 0.3:
        return (far,) * max(1, len(values))
    where = chance.randrange(len(values))
    return (*values[:where], far, *values[where + 1 :])


def _other_shape(shape: tuple[int, ...], chance: random.Random) -> tuple[int, ...]:
    draw = chance.random()
    if not shape or draw < 0.15:
        return (*shape, chance.choice((0, 1, 2, 3)))
    where = chance.randrange(len(shape))
    if draw < 0.3:
        return shape[:where] + shape[where + 1 :]
    size = max(0, chance.choice((0, 1, 2, 3, shape[where] - 1, shape[where] + 1, 17)))
    return (*shape[:where], size, *shape[where + 1 :])


_CHANGES: dict[type, Callable[[Any, random.Random], Any]] = {
    TensorArgument: _other_tensor,
    list: _other_list,
    bool: lambda value, _: not value,
    int: lambda _, chance: chance.choice(_NUMBERS if chance.random() < 0.8 else _MORE_NUMBERS),
    float: lambda _, chance: chance.choice(_FLOATS),
    str: lambda _, chance: chance.choice(_WORDS),
    torch.dtype: lambda _, chance: DTYPES[chance.choice(_DTYPES)],
    type(None): lambda _, chance: chance.choice([None, 1, 0, -1, _SOME_TENSOR, True, 2.0]),
}
