"""The handle classes of a program's own classes, each of which stands for its program's class."""

import copy
import copyreg
import functools
from types import new_class
from typing import Any

import torch

# Where a handle class and its program's class name each other.
_PROGRAMS_CLASS, _HANDLE_CLASS = "_gpufaas_programs_class", "_gpufaas_handle_class"


def cpu_class(kind: type) -> type:
    """Return the CPU tensor class of a handle class; another class is returned as it is."""
    found: type = kind.__dict__.get(_PROGRAMS_CLASS, kind)  # no matter what it is derived from
    return found


def set_cpu_class(handle_class: type, kind: type) -> None:
    """Let a handle class of the shim's own stand for a class of torch's."""
    setattr(handle_class, _PROGRAMS_CLASS, kind)


def known_handle_class(kind: type) -> type | None:
    """Return the handle class that was made for a program's class."""
    kept = kind.__dict__.get(_HANDLE_CLASS)
    return None if kept is None else kept.handle_class


def make_handle_class(base: type, kind: type, own: dict[str, Any]) -> type:
    """Make the handle class of a program's class, with a namespace of its own."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **own}
    parts = kind.__name__, (base, kind), {**own, _PROGRAMS_CLASS: kind}
    # The steps of PyTorch's metaclass; the program's may have others, for the program's classes.
    made: Any = type.__new__(_metaclass(type(kind)), *parts)
    type(torch.Tensor).__init__(made, *parts)
    # If several threads do this at once, each may use a class of its own: they are equal.
    type.__setattr__(kind, _HANDLE_CLASS, _Kept(made))
    return made  # type: ignore[no-any-return] # mypy knows no class that is made so


class _Kept:
    """Keeps a handle class in its program's class, with which it is collected."""

    def __init__(self, handle_class: type) -> None:
        self.handle_class = handle_class

    def __reduce__(self) -> Any:
        return type(None), ()  # the copy of a class that is pickled by value has none yet


class _HandleType(type(torch.nn.Parameter)):  # type: ignore[misc] # PyTorch has a metaclass for it
    """Makes a handle class equal to its program's class, as in tables by class."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> Any:
        """Derive from the program's class, which `class Derived(type(tensor))` means."""
        programs = tuple(map(cpu_class, bases))
        return new_class(name, programs, options, lambda made: made.update(namespace))

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(cpu_class(cls), name, value)

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and cpu_class(cls) is cpu_class(other)

    def __hash__(cls) -> int:
        return hash(cpu_class(cls))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cpu_class(cls))

    def __subclasscheck__(cls, other: type) -> bool:
        # C++ asks a class before those that it is derived from. No class of CPU tensors may be
        # asked before one of handles: its results would be CPU tensors. A program's metaclass may
        # ask all subclasses in turn, and would come back here without end.
        return type.__subclasscheck__(cpu_class(cls), other) and hasattr(other, _PROGRAMS_CLASS)


@functools.cache
def _metaclass(programs: type) -> Any:
    """Return the metaclass for the handle classes of classes that have this metaclass."""
    made: Any = _HandleType
    if not issubclass(_HandleType, programs):
        made = type("_HandleType", (_HandleType, programs), {})
    # Pickled as the program's class, which `copy.copy` returns as it is.
    copyreg.pickle(made, lambda kind: (copy.copy, (cpu_class(kind),)))
    return made
