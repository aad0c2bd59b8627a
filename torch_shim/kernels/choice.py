"""What a substitute is, and how one is made of a function with the operator's parameters."""

from collections.abc import Callable
from typing import Any

import torch

from torch_shim.errors import UnsupportedCall

# A substitute gets the operator and its arguments, and returns the result.
Substitute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# A choice gets the arguments of a call that the CPU refused; None if there is no substitute.
Choice = Callable[[tuple[Any, ...], dict[str, Any]], Substitute | None]


def always(function: Callable[..., Any]) -> Choice:
    substitute = _calling(function)
    return lambda _args, _kwargs: substitute


def for_dtypes(dtypes: frozenset[torch.dtype], function: Callable[..., Any]) -> Choice:
    """Compute with this function if the first argument has one of these dtypes."""
    return substituting(dtypes, _calling(function))


def substituting(dtypes: frozenset[torch.dtype], substitute: Substitute) -> Choice:
    """Use this substitute if the first argument has one of these dtypes."""

    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        return substitute if isinstance(first, torch.Tensor) and first.dtype in dtypes else None

    return choose


def refusing(name: str, remedy: str) -> Choice:
    """Raise UnsupportedCall, which names the operator and the remedy."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedCall(f"torch.ops.aten.{name}", remedy)

    return always(refuse)


def into_out(out: torch.Tensor | None, result: Any) -> Any:
    return result if out is None else out.resize_(result.shape).copy_(result)


def is_in_place(operator: Any) -> bool:
    """Whether the operator's name says that it writes to its first argument."""
    name: str = getattr(operator, "__name__", "").partition(".")[0]
    if name.startswith("__"):
        return name.startswith("__i")
    return name.endswith("_")


def _calling(function: Callable[..., Any]) -> Substitute:
    def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del func
        named = {name: value for name, value in kwargs.items() if name != "out"}
        return into_out(kwargs.get("out"), function(*args, **named))

    return compute
