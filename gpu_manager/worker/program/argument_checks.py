"""Checks in front of operators whose kernels believe their arguments.

Each check raises ValueError for arguments with which the kernel would leave the memory of its
tensors, or leave memory that it gives as it found it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

Operator = Callable[..., Any]

_ENUMERATED = ("ScalarType", "Layout", "MemoryFormat")


def checked(name: str, operator: Operator) -> Operator:
    """The operator, behind the checks that its name asks for."""
    short = _short(name)
    if short in _FACTORIES:
        operator = _zero_filled(operator)
    check = _CHECKS.get(short)
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
        for overload in operator.overloads():
            yield getattr(operator, overload)._schema  # noqa: SLF001 - as above


# --- Values and shapes ------------------------------------------------------------------------


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


_INTERPOLATIONS = _PADDINGS = range(3)


def _grid_sampler(
    input: Any,  # noqa: A002 - torch's name
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: Any,
) -> None:
    del input, grid, align_corners
    _require(interpolation_mode in _INTERPOLATIONS, f"no interpolation {interpolation_mode}")
    _require(padding_mode in _PADDINGS, f"no padding {padding_mode}")


def _batch_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> None:
    channels = input.size(1) if input.dim() > 1 else -1
    for tensor in (weight, bias, running_mean, running_var):
        if isinstance(tensor, torch.Tensor):
            _require(tuple(tensor.shape) == (channels,), f"not one number a channel: {tensor.shape}")


_CHECKS: dict[str, Operator] = {
    "grid_sampler_2d": _grid_sampler,
    "grid_sampler_3d": _grid_sampler,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_batch_norm_with_update": _batch_norm,
}
