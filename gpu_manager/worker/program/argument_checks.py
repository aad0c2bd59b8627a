"""Operators as programs get them: behind checks of their arguments, giving no memory unwritten."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_manager.worker.program.value_checks import CHECKS

Operator = Callable[..., Any]

_ENUMERATED = ("ScalarType", "Layout", "MemoryFormat")


def checked(name: str, operator: Operator) -> Operator:
    """The operator, behind the checks that its name asks for."""
    short = _short(name)
    if short in _FACTORIES:
        operator = _zero_filled(operator)
    check = CHECKS.get(name[2:]) or CHECKS.get(short)
    if check is not None:
        operator = _behind(check, operator)
    if name.startswith("a:"):
        operator = _without_numbers_for_kinds(operator)
    return operator


def _short(name: str) -> str:
    """`grid_sampler_2d` of `t:torch.grid_sampler_2d` and `a:aten::grid_sampler_2d.default`."""
    rest = name[2:]
    if "::" in rest:
        return rest.partition("::")[2].partition(".")[0]
    return rest.rpartition(".")[2]


def _behind(check: Operator, operator: Operator) -> Operator:
    @functools.wraps(operator, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        check(*arguments, **named)
        return operator(*arguments, **named)

    return call


# --- Memory that nobody wrote to --------------------------------------------------------------

_FACTORIES = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


def _zero_filled(operator: Operator) -> Operator:
    """A factory whose tensors show no earlier content of the memory that they are given."""

    def call(*arguments: Any, **named: Any) -> torch.Tensor:
        made: torch.Tensor = operator(*arguments, **named)
        if made.is_contiguous():
            return made.zero_()
        storage = made.untyped_storage()
        torch.empty(0, dtype=torch.uint8, device=made.device).set_(
            storage, 0, (storage.nbytes(),), (1,)
        ).zero_()
        return made

    return call


# --- Kinds that are numbers in C++ ------------------------------------------------------------


def _without_numbers_for_kinds(operator: Operator) -> Operator:
    """A registered operator that refuses a number for a dtype, layout or memory format.

    Torch takes any number there, and looks it up in tables behind whose end others lie.
    """
    positions: set[int] = set()
    names: set[str] = set()
    for schema in _schemas(operator):
        for position, argument in enumerate(schema.arguments):
            if any(kind in str(argument.real_type) for kind in _ENUMERATED):
                names.add(argument.name)
                if not argument.kwarg_only:
                    positions.add(position)
    if not names:
        return operator

    def call(*arguments: Any, **named: Any) -> Any:
        for position, value in enumerate(arguments):
            if position in positions and isinstance(value, int) and not isinstance(value, bool):
                raise ValueError(f"{value} is no dtype, layout or memory format")
        for name in names.intersection(named):
            if isinstance(named[name], int):
                raise ValueError(f"{name}={named[name]} is no dtype, layout or memory format")
        return operator(*arguments, **named)

    return call


def _schemas(operator: Operator) -> Iterator[Any]:
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - torch.ops gives no public name
        yield operator._schema  # noqa: SLF001 - as above
    elif isinstance(operator, torch._ops.OpOverloadPacket):  # noqa: SLF001 - as above
        for overload in operator.overloads():  # type: ignore[no-untyped-call] # torch gives it no types
            yield getattr(operator, overload)._schema  # noqa: SLF001 - as above
