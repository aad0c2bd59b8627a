"""The structure of a module: what all instances of one model have in common."""

from collections.abc import Hashable, Iterator
from typing import Any

import torch

# Attributes of these types tell variants of a class from each other. Texts are left to the guards:
# they are often names, which differ between the instances of one variant.
_PLAIN = (bool, int, float)
_OF_EVERY_MODULE = frozenset({"training"})


def structure_of(module: torch.nn.Module) -> Hashable:
    """Return what tells this module's structure from another's.

    Modules with the same structure may still differ, which Dynamo's guards notice: the structure
    only selects the graphs whose guards are asked. Tied weights and shared submodules are part of
    it: the guards do not notice parameters that are tied in one module and not in another.
    """
    numbers: dict[int, int] = {}
    return tuple(
        (type(part), tuple(_children(part, numbers)), tuple(_tensors(part, numbers)), _plain(part))
        for part in module.modules()
    )


def _children(part: torch.nn.Module, numbers: dict[int, int]) -> Iterator[Hashable]:
    for name, child in part._modules.items():  # noqa: SLF001 - children() drops the repeated ones
        yield name, None if child is None else numbers.setdefault(id(child), len(numbers))


def _tensors(part: torch.nn.Module, numbers: dict[int, int]) -> Iterator[Hashable]:
    for held in (part._parameters, part._buffers):  # noqa: SLF001 - parameters() drops tied ones
        for name, value in held.items():
            if value is None:
                yield name, None
            else:
                number = numbers.setdefault(id(value), len(numbers))
                yield name, number, tuple(value.shape), value.dtype, value.requires_grad


def _plain(part: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in vars(part).items()
        if type(value) in _PLAIN and name not in _OF_EVERY_MODULE
    )
