"""Which operators write, draw random numbers or may mix devices, and what each of these needs."""

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

from torch_shim import randomness, storages
from torch_shim.dispatch import Handler, Operator, existing, handles, special
from torch_shim.tensors import (
    PLAIN,
    CudaTensor,
    NoTorchFunction,
    Tensor,
    become_cuda,
    run,
    run_anywhere,
)

_IN_PLACE_OPERATORS = frozenset(
    "__iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imatmul__ __imod__ __imul__ __ior__ "
    "__ipow__ __irshift__ __isub__ __itruediv__ __ixor__ __setitem__ __setstate__".split()
)
_NO_WRITES = frozenset("requires_grad_ detach_ rename_ retain_grad_ _coalesced_".split())
# Written although neither the name nor `out=` says so.
_HIDDEN_WRITES = frozenset(
    "batch_norm instance_norm embedding embedding_bag native_batch_norm cudnn_batch_norm "
    "_batch_norm_impl_index _native_batch_norm_legit".split()
)
_RANDOM = frozenset(
    "alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d "
    "dropout3d dropout_ exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout "
    "feature_dropout_ fractional_max_pool2d fractional_max_pool3d geometric_ gumbel_softmax "
    "kaiming_normal_ kaiming_uniform_ log_normal_ multi_head_attention_forward multinomial "
    "native_dropout normal normal_ orthogonal_ poisson rand_like randint_like randn_like random_ "
    "rrelu rrelu_ scaled_dot_product_attention trunc_normal_ uniform_ xavier_normal_ "
    "xavier_uniform_ gru lstm rnn_relu rnn_tanh _standard_gamma _sample_dirichlet".split()
)
_ANYWHERE = frozenset(
    "__getitem__ __setitem__ __set__ _has_compatible_shallow_copy_type _pad_packed_sequence "
    "can_cast copy_ ctc_loss data expand_as get_device gru index index_put index_put_ "
    "is_same_size is_set_to lstm promote_types reshape_as resize_as_ result_type rnn_relu rnn_tanh "
    "size tensor_split view_as _weight_norm_interface".split()
)


def install() -> None:
    """Has every operator classified at its first use."""
    special.classifiers.append(_classify)


def _classify(operator: Operator) -> Handler | None:
    name = _name_of(operator)
    writes = _writes(operator, name)
    random = name in _RANDOM
    anywhere = name in _ANYWHERE
    if not (writes or random or anywhere):
        return None
    if not random and not anywhere:
        return _write
    return _handler(writes=writes, random=random, anywhere=anywhere)


def _name_of(operator: Operator) -> str:
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - the type's only home
        return operator.overloadpacket.__name__
    return getattr(operator, "__name__", "")


def _writes(operator: Operator, name: str) -> bool:
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - the type's only home
        return bool(operator._schema.is_mutable)  # noqa: SLF001 - the one place that says so
    if isinstance(operator, torch._ops.OpOverloadPacket):  # noqa: SLF001 - see above
        overloads = [getattr(operator, overload) for overload in operator.overloads()]
        return any(overload._schema.is_mutable for overload in overloads)  # noqa: SLF001 - see above
    if isinstance(operator, FunctionType) and "inplace" in operator.__code__.co_varnames:
        return True
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return in_place or name in _IN_PLACE_OPERATORS or name in _HIDDEN_WRITES


def _handler(*, writes: bool, random: bool, anywhere: bool) -> Handler:
    inner = run_anywhere if anywhere else run

    def draw(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not random or kwargs.get("generator") is not None:
            return inner(func, args, kwargs)
        with randomness.drawing():
            return inner(func, args, kwargs)

    def handler(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not writes:
            return draw(func, args, kwargs)
        try:
            return draw(func, args, kwargs)
        finally:
            _note(func, args, kwargs)

    return handler


def _write(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return run(func, args, kwargs)
    finally:
        _note(func, args, kwargs)


def _note(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Counts the write, failed or not, on all that may have been written."""
    first = args[0] if args else None
    name = getattr(func, "__name__", "")
    if isinstance(first, Tensor) and (name in _IN_PLACE_OPERATORS or name.endswith("_")):
        storages.note_write(first)
    elif not isinstance(func, FunctionType) or kwargs.get("inplace") or name in _HIDDEN_WRITES:
        _note_all(args)
        _note_all(kwargs.values())
    else:
        _note_all((kwargs.get("tensor"), kwargs.get("out")))


def _note_all(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            storages.note_write(value)
        elif isinstance(value, list | tuple):
            _note_all(value)


@handles(*existing(torch, ["_pack_padded_sequence"]))
def _pack_padded_sequence(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch sizes stay on the CPU."""
    with NoTorchFunction():
        data, batch_sizes = func(*args, **kwargs)
    return become_cuda(data), batch_sizes


@handles(*existing(torch, ["_pad_packed_sequence"]))
def _pad_packed_sequence(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The lengths stay on the CPU."""
    with NoTorchFunction():
        data, lengths = func(*args, **kwargs)
    return become_cuda(data), lengths
