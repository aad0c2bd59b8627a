"""Copies of a call's arguments for a trace that runs beside the caller.

The caller goes on and changes its lists, dictionaries and caches; the trace reads the copies, which
stay as they were in the call. Tensors and modules are not copied.
"""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch

_AS_THEY_ARE = (
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def is_plain(args: Any, kwargs: Any) -> bool:
    """Whether all arguments are tensors, numbers and the like, which need no copies."""
    plain = (*_ATOMS, torch.Tensor)
    return all(isinstance(value, plain) for value in (*args, *kwargs.values()))


def snapshot(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with copies of the objects that the caller may change.

    What the module itself holds is not copied: the trace finds it through the module too, and the
    two have to be one object.
    """
    if is_plain(args, kwargs):
        return args, kwargs
    copies = _Copies(module)
    return tuple(map(copies.of, args)), {name: copies.of(value) for name, value in kwargs.items()}


class _Copies:
    """Copies of objects, one of each."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._held = set(_ids_held_by(module))
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return the object's copy, or the object itself where it is not to be copied."""
        if isinstance(value, (*_ATOMS, *_AS_THEY_ARE)) or id(value) in self._held:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value  # where it is part of itself
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is tuple:
            copied = tuple(map(self.of, value))
            same = all(one is other for one, other in zip(copied, value, strict=True))
            return value if same else copied
        if kind in {list, set, deque}:
            items = set(value) if kind is set else list(map(self.of, list(value)))
            return deque(items, value.maxlen) if kind is deque else items
        if isinstance(value, tuple | list | set | frozenset | deque):
            return value
        made = _empty_like(value)
        return value if made is None else self._filled(made, value)

    def _filled(self, copy: Any, value: Any) -> Any:
        self._made[id(value)] = copy
        if isinstance(value, dict):
            put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
            for key, item in list(value.items()):
                put(copy, key, self.of(item))
        for name, item in list(getattr(value, "__dict__", {}).items()):
            copy.__dict__[name] = self.of(item)
        return copy


def _empty_like(value: Any) -> Any:
    """Return a new object of the same class without its content; None where that runs code."""
    kind: Any = type(value)
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory) if kind is defaultdict else None
    if isinstance(value, OrderedDict):
        return OrderedDict.__new__(kind)
    if isinstance(value, dict):
        return dict.__new__(kind)
    ordinary = kind.__new__ is object.__new__ and not any(
        vars(base).get("__slots__") for base in kind.__mro__
    )
    return object.__new__(kind) if ordinary and hasattr(value, "__dict__") else None


def _ids_held_by(module: torch.nn.Module) -> Iterator[int]:
    """Yield the identities of the objects that a module holds, and of what those hold."""
    seen: set[int] = set()
    waiting: list[Any] = [held for part in module.modules() for held in vars(part).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (*_ATOMS, *_AS_THEY_ARE)) or id(value) in seen:
            continue
        seen.add(id(value))
        yield id(value)
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | deque):
            waiting.extend(value)
        waiting.extend(getattr(value, "__dict__", {}).values())
