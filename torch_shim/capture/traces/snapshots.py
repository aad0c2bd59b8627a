"""What a trace reads while its caller goes on: copies of the call, and whether that changed.

The caller goes on and changes its lists, dictionaries and caches; the trace reads the copies, which
stay as they were in the call. Tensors and modules are not copied.
"""

import contextlib
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

_UNCHANGING = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
_AS_THEY_ARE = (torch.Tensor, torch.nn.Module, torch.Generator, *_UNCHANGING)
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


class CallState:
    """The gradient mode and autocast settings of the thread that created this object."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cuda", "cpu")
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._autocast:
                was_enabled, was_dtype = (
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                )
                stack.callback(_set_autocast, kind, was_dtype, enabled=was_enabled)
                _set_autocast(kind, dtype, enabled=enabled)
            yield


def _set_autocast(kind: str, dtype: torch.dtype, *, enabled: bool) -> None:
    """Set autocast directly: `torch.autocast` would also create a cache."""
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)


# Dynamo reads lists, dictionaries, attributes and the shapes of tensors while it traces, and reads
# them again at the end, when it makes the guards. If another thread changes one in between, the
# guards accept calls for which the graph is wrong. Every object is noted when the trace first
# reads it, and a trace after which one is different is given up.

_NoHandles = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - the documented way to step aside

# Changes whenever a dictionary does, and never returns to a former value. Python 3.14 has none.
_version_of_dict: Callable[[dict[Any, Any]], int] | None = getattr(
    torch._C._dynamo.guards,  # noqa: SLF001 - its only location
    "dict_version",
    None,
)


class TraceReads:
    """The states of the objects that one trace has read, as they were when it read them."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, list[Any]]] = {}

    def note(self, value: Any) -> None:
        """Record an object's state, unless the trace has read it before."""
        if id(value) not in self._states:
            state = _state_of(value)
            if state:
                self._states[id(value)] = value, state

    def have_changed(self) -> bool:
        return any(not _are_same(_state_of(value), state) for value, state in self._states.values())


def _state_of(value: Any) -> list[Any]:
    """Return what can change of an object, one entry each; nothing for an unchanging one."""
    if isinstance(value, torch.Tensor):
        return _layout_of(value)
    if isinstance(value, dict) and "__builtins__" in value:  # what `globals()` returns
        # Dynamo itself adds names there, all with an underscore in front.
        return [part for name in value if name[:1] != "_" for part in (name, value[name])]
    if isinstance(value, dict):
        return [*_content_of(value), *_attributes_of(value)]
    if isinstance(value, list | deque | set):
        return [len(value), *value, *_attributes_of(value)]
    if isinstance(value, _UNCHANGING):
        return []
    return _attributes_of(value)


def _layout_of(tensor: torch.Tensor) -> list[Any]:
    with _NoHandles():
        if tensor.layout is not torch.strided or tensor.is_nested:
            return [tensor.layout, tensor.requires_grad]
        sizes, strides = tuple(tensor.shape), tensor.stride()
        return [*sizes, *strides, tensor.dtype, tensor.requires_grad, tensor.storage_offset()]


def _attributes_of(value: Any) -> list[Any]:
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:
        return []
    state = _content_of(attributes)
    if isinstance(value, torch.nn.Module):  # Dynamo looks into its tables without reading them
        for held in attributes.values():
            if isinstance(held, dict):
                state += _content_of(held)
    return state


def _content_of(held: dict[Any, Any]) -> list[Any]:
    if _version_of_dict is not None:
        return [_version_of_dict(held)]
    return [len(held), *held, *held.values()]


def _are_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two states are equal; objects are compared by identity, numbers by value."""
    return len(one) == len(other) and all(
        operator.is_(a, b) or (type(a) is int and a == b) for a, b in zip(one, other, strict=True)
    )
