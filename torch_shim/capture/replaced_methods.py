"""Detects that a method was replaced on a class, which Dynamo's guards do not detect.

Dynamo guards a module's attributes, hooks and instance methods, and functions in globals and
closures, but not the functions of a class: after `Net.forward = other` Dynamo would keep using the
old graph.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

_KINDS = (FunctionType, classmethod, staticmethod, property)
_OF_NO_INTEREST = (torch.Tensor, ModuleType, type, FunctionType)


class Methods:
    """The functions of every class that takes part in a module's call, as first recorded."""

    def __init__(self, module: torch.nn.Module, others: Iterable[type] = ()) -> None:
        self.kinds = list(dict.fromkeys((*others, *_classes_of(module))))
        self._watched = [_Watched(kind) for kind in self.kinds]

    def unchanged(self) -> bool:
        """Whether all of these functions are still the recorded ones."""
        try:
            for watched in self._watched:
                if len(watched.members) != watched.count:
                    return False
                if watched.get(watched.members) != watched.values:  # functions equal themselves
                    return False
        except KeyError:
            return False
        return True


class _Watched:
    """The recorded functions of one class."""

    def __init__(self, kind: type) -> None:
        self.members = vars(kind)
        self.count = len(self.members)
        names = [name for name, value in self.members.items() if isinstance(value, _KINDS)]
        self.get: Callable[[Any], Any] = operator.itemgetter(*names) if names else _nothing
        self.values = self.get(self.members)


def _nothing(members: Any) -> None:
    """What to get of a class without functions."""


def _classes_of(module: torch.nn.Module) -> Iterator[type]:
    """Yield the classes of all submodules and of the objects they hold, with bases, each once."""
    seen: set[type] = {object}
    for part in module.modules():
        for value in (part, *vars(part).values()):
            if isinstance(value, _OF_NO_INTEREST):
                continue
            for kind in type(value).__mro__:
                if kind not in seen and kind.__module__ != "builtins":
                    seen.add(kind)
                    yield kind
