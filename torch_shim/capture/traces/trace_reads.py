"""What a trace has read: compared at its end, so that no trace holds for a mixture of states.

Dynamo reads lists, dictionaries, attributes and the shapes of tensors while it traces, and reads
them again at the end, when it makes the guards. If another thread changes one in between, the
guards accept calls for which the graph is wrong. Every object is noted when the trace first reads
it, and a trace after which one is different is given up.
"""

import contextlib
import operator
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

_NoHandles = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - the documented way to step aside

# Changes whenever a dictionary does, and never returns to a former value. Python 3.14 has none.
_version_of_dict: Callable[[dict[Any, Any]], int] | None = getattr(
    torch._C._dynamo.guards,  # noqa: SLF001 - its only location
    "dict_version",
    None,
)
_UNCHANGING = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
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
        """Whether one of the objects is different from what was noted."""
        return any(not _are_same(_state_of(value), state) for value, state in self._states.values())


class _Current(threading.local):
    reads: TraceReads | None = None


_current = _Current()


@contextlib.contextmanager
def noted_in(reads: TraceReads) -> Iterator[None]:
    """Note what this thread's trace reads inside the `with` block."""
    before, _current.reads = _current.reads, reads
    try:
        yield
    finally:
        _current.reads = before


def note(value: Any) -> None:
    """Note an object that this thread's trace is about to read, if it traces."""
    if _current.reads is not None:
        _current.reads.note(value)


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
