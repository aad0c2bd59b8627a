"""How a function of PyTorch is replaced: once, and so that it can still be found."""

import functools
from collections.abc import Callable
from typing import Any


def replace(owner: object, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Puts `make(original)` in the original's place, if there is an original.

    The replacement carries the original as `__wrapped__`, and its name and module: Dynamo and
    whoever reads a captured graph find it there.
    """
    if not hasattr(owner, name):
        return
    original = getattr(owner, name)
    replacement = make(original)
    functools.update_wrapper(replacement, original)
    set_attribute(owner, name, replacement)


def set_attribute(owner: object, name: str, value: object) -> None:
    """Sets an attribute that PyTorch's types declare otherwise."""
    setattr(owner, name, value)


def original_of(function: Any) -> Any:
    """What a function of PyTorch was before we replaced it."""
    return getattr(function, "__wrapped__", function)
