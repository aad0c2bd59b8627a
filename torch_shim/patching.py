"""Replaces functions of PyTorch, keeps the originals, and knows the names of the redirected GPU."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

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


def redirect(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Replace an attribute, if it exists, by a function with the original before its arguments."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(native, *args, **kwargs)

        return call

    replace(owner, name, make)


def set_attribute(owner: object, name: str, value: object) -> None:
    """Set an attribute that PyTorch's type annotations declare with another type."""
    setattr(owner, name, value)


@contextmanager
def assigned(target: object, /, **values: Any) -> Iterator[None]:
    """Give an object these attributes inside the `with` block, and then those that it had."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


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


# The redirected GPU, and the spellings of its name that users may write.

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

DeviceLike: TypeAlias = torch.device | str | int | None

# Module attributes, to save lookups: every patched call uses them.
_mode = torch._C._get_dispatch_mode  # noqa: SLF001 - there is no cheap public check
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001 - see above


def tracing_fakes() -> bool:
    """Return True while this thread propagates fake tensors: patched functions then do nothing."""
    return _mode(_FAKE) is not None


@functools.lru_cache(maxsize=256)
def names_cuda(device: DeviceLike) -> bool:
    """Return True for any spelling of the redirected GPU; raise for any other CUDA device."""
    if device is None:
        return False
    parsed = CUDA if device == 0 and isinstance(device, int) else torch.device(device)
    if parsed.type != "cuda":
        return False
    if parsed.index not in {None, 0}:
        why = f"CUDA error: invalid device ordinal ({parsed}: there is 1 GPU)"
        raise torch.AcceleratorError(why)
    return True


def of_device(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return a new function of a device, which raises for any second GPU.

    A new one each time, since Dynamo identifies functions by identity.
    """

    def call(device: DeviceLike = None) -> Any:
        names_cuda(device)
        return answer()

    call.__name__ = call.__qualname__ = name
    return call
