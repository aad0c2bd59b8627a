"""Replaces functions of PyTorch, and keeps the originals accessible."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import overrides

_modes_are_on = torch._C._is_torch_function_mode_enabled  # noqa: SLF001 - as torch's own ask


def replace(owner: object, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace an attribute by `make(original)`, if the attribute exists.

    The replacement has the original as `__wrapped__`, and the original's name and module, by which
    Dynamo and the encoder of captured graphs find the original.
    """
    if not hasattr(owner, name):
        return
    original = getattr(owner, name)
    replacement = make(original)
    functools.update_wrapper(replacement, original)
    if isinstance(owner, type) and not hasattr(original, "__module__"):  # a method of C
        replacement.__module__ = f"{owner.__module__}.{owner.__name__}"  # as torch's errors name it
    set_attribute(owner, name, replacement)


def set_attribute(owner: object, name: str, value: object) -> None:
    """Set an attribute that PyTorch's type annotations declare with another type."""
    setattr(owner, name, value)


def original_of(function: Any) -> Any:
    """Return the original of a replaced function; any other function is returned unchanged."""
    return getattr(function, "__wrapped__", function)


def seen_by_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass calls to the function modes around them first, `with torch.device(...)` among them.

    The function then runs outside of them, as in torch. C++ would pass them the native function,
    from within the function, and they would call the function once more.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _modes_are_on() or torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        return overrides.handle_torch_function(call, args[:1], *args, **kwargs)

    return call
