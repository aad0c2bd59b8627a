"""Operators as programs get them: behind checks of their arguments, giving no memory unwritten."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.program.checks.value_checks import CHECKS, reduction

Operator = Callable[..., Any]


def checked(name: str, operator: Operator) -> Operator:
    """The operator, behind the checks that its name asks for."""
    short = short_name(name)
    choices = _choices(short, operator)
    if short in _FACTORIES:
        operator = _zero_filled(operator)
    check = CHECKS.get(name[2:]) or CHECKS.get(short)
    if check is not None:
        operator = _behind(check, operator)
    return _with_checked_choices(choices, operator) if choices else operator


def short_name(name: str) -> str:
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


# --- Choices that are numbers in C++ ----------------------------------------------------------

_LOSSES = ("loss", "loss2d", "loss_nd", "loss_forward", "entropy", "with_logits", "kl_div")
_KINDS = ("ScalarType", "Layout", "MemoryFormat")


class _Choice(NamedTuple):
    """An argument that is a choice between a few things."""

    position: int | None  # none where it has to be named
    name: str
    check: Operator


def _with_checked_choices(choices: Sequence[_Choice], operator: Operator) -> Operator:
    """An operator that refuses numbers that are no choice.

    Torch takes any number for a dtype, layout or memory format of a registered operator, and looks
    it up in tables behind whose end others lie. It takes any number for a reduction as well.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        for position, name, check in choices:
            if name in named:
                check(named[name])
            elif position is not None and position < len(arguments):
                check(arguments[position])
        return operator(*arguments, **named)

    return call


def _choices(short: str, operator: Operator) -> list[_Choice]:
    found: dict[_Choice, None] = {}
    for schema in _schemas(short, operator):
        for position, argument in enumerate(schema.arguments):
            check = _check_of_choice(argument)
            if check is not None:
                place = None if argument.kwarg_only else position
                found[_Choice(place, argument.name, check)] = None
    return list(found)


def _check_of_choice(argument: Any) -> Operator | None:
    if any(kind in str(argument.real_type) for kind in _KINDS):
        return _no_number
    return reduction if argument.name == "reduction" else None


def _no_number(value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"{value} is no dtype, layout or memory format")


def _schemas(short: str, operator: Operator) -> Iterator[Any]:
    """Those of a registered operator, or of the registered ones that a function stands for."""
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - torch.ops gives no public name
        yield operator._schema  # noqa: SLF001 - as above
        return
    packet: Any = operator
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001 - as above
        packet = getattr(torch.ops.aten, short, None)
        if packet is None or not short.endswith(_LOSSES):
            return
    for overload in packet.overloads():
        yield getattr(packet, overload)._schema  # noqa: SLF001 - as above
