"""The handlers for operators that write to tensors or may mix devices."""

import functools
from types import FunctionType
from typing import Any

import torch

from torch_shim.kernels.substitution import name_of
from torch_shim.process_report import report
from torch_shim.tensors import mixed_devices, write_epochs
from torch_shim.tensors.absent_bytes import NO_BYTES
from torch_shim.tensors.dispatch import Handler, Operator, handles, names, special
from torch_shim.tensors.handles import (
    PLAIN,
    CudaTensor,
    NoTorchFunction,
    Tensor,
    become_cuda,
    refuse_mixed_devices,
    run,
    run_anywhere,
    substituted,
    wrap,
)

_METHOD = type(Tensor.add_)  # the type of C++ methods in Python
_IN_PLACE_OPERATORS = mixed_devices.IN_PLACE | names("__setitem__ __setstate__")
_NO_WRITES = names("requires_grad_ detach_ rename_ retain_grad_ _coalesced_")
# Operators that write to arguments, although neither the name nor `out=` shows it, unless one
# argument is None or False: its position, its name, and whether they write where it is not given.
_HIDDEN_WRITES = {
    "embedding": (3, "max_norm", False),
    "embedding_bag": (3, "max_norm", False),
    "instance_norm": (5, "use_input_stats", True),
    "batch_norm": (5, "training", False),
    "native_batch_norm": (5, "training", True),
    "cudnn_batch_norm": (5, "training", True),
    "_batch_norm_impl_index": (5, "training", True),
    "_native_batch_norm_legit": (5, "training", True),
}
_ANYWHERE = names(
    "__getitem__ __setitem__ __set__ _has_compatible_shallow_copy_type _pad_packed_sequence "
    "can_cast copy_ ctc_loss data expand_as get_device gru index index_put index_put_ "
    "is_same_size is_set_to lstm promote_types reshape_as resize_as_ result_type rnn_relu rnn_tanh "
    "size tensor_split view_as _weight_norm_interface"
)
# These take tensors in a list, or one by one, or both.
_LISTS = names(
    "_grouped_mm align_tensors block_diag cartesian_prod cat chain_matmul column_stack concat "
    "concatenate dstack einsum hstack linalg_multi_dot meshgrid multi_dot pad_sequence row_stack "
    "stack tensordot vstack"
)


def install() -> None:
    """Register the classifier, which is applied to every operator at its first use."""
    special.classifiers.append(_classify)


def _classify(operator: Operator) -> Handler | None:
    name = name_of(operator)
    if name not in NO_BYTES:
        report.note_operator()
    if name in mixed_devices.EACH:
        return _run_each
    how: Handler = run
    if name in _LISTS or name.startswith("_foreach_"):
        how = _run_list
    elif name in _ANYWHERE:
        how = run_anywhere
    if not _writes(operator, name):
        return None if how is run else how
    if how is run and isinstance(operator, _METHOD) and name.endswith("_"):
        return _write_first
    return functools.partial(_write, how)


def _run_list(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose tensors may stand in lists, which `run` does not look into."""
    refuse_mixed_devices(func, args, kwargs)
    return run(func, args, kwargs)


def _run_each(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on several tensors, each of which keeps its device."""
    with NoTorchFunction():
        result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return wrap(result)
    for made, source in zip(result, mixed_devices.tensors_in(args), strict=True):
        if isinstance(source, CudaTensor):
            wrap(made)
    return result


def _writes(operator: Operator, name: str) -> bool:
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - the type's only location
        return bool(operator._schema.is_mutable)  # noqa: SLF001 - there is no public attribute
    if isinstance(operator, torch._ops.OpOverloadPacket):  # noqa: SLF001 - see above
        packet: Any = operator
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        return any(overload._schema.is_mutable for overload in overloads)  # noqa: SLF001 - see above
    if isinstance(operator, FunctionType) and "inplace" in operator.__code__.co_varnames:
        return True
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return in_place or name in _IN_PLACE_OPERATORS or name in _HIDDEN_WRITES


def _write_first(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the usual case fast: a method that writes to its tensor, all arguments on the GPU."""
    if kwargs or any(type(argument) in PLAIN for argument in args):
        return _write(run, func, args, kwargs)
    first = args[0]
    try:
        with NoTorchFunction():
            result = func(*args)
    except RuntimeError as error:
        result = substituted(error, func, args, {})
    finally:
        write_epochs.note_write(first)
    return result if result is first else wrap(result)


def _write(how: Handler, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return how(func, args, kwargs)
    finally:
        _note(func, args, kwargs)


def _note(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a write, failed or not, on every argument that may have been written to."""
    first = args[0] if args else None
    name = getattr(func, "__name__", "")
    if isinstance(first, Tensor) and (name in _IN_PLACE_OPERATORS or name.endswith("_")):
        write_epochs.note_write(first)
    elif name in _HIDDEN_WRITES and not _writes_hidden(name, args, kwargs):
        return
    elif not isinstance(func, FunctionType) or kwargs.get("inplace") or name in _HIDDEN_WRITES:
        write_epochs.note_all(args)
        write_epochs.note_all(kwargs.values())
    else:
        write_epochs.note_all((kwargs.get("tensor"), kwargs.get("out")))


def _writes_hidden(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments have this operator write: to running statistics, to what it norms."""
    position, keyword, usual = _HIDDEN_WRITES[name]
    given = args[position] if len(args) > position else kwargs.get(keyword, usual)
    return given is not None and given is not False


@handles(torch._pack_padded_sequence, torch._pad_packed_sequence)  # noqa: SLF001 - `torch.nn.utils.rnn` calls them
def _pack_or_pad(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack or unpack; the sizes of batches, or the lengths, stay on the CPU."""
    with NoTorchFunction():
        data, sizes = func(*args, **kwargs)
    return become_cuda(data), sizes


@handles(Tensor.module_load)
def _module_load(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Load a parameter; it keeps its device, unless the loaded tensor replaces it (`assign`)."""
    kept = args[1] if kwargs.get("assign") else args[0]
    with NoTorchFunction():
        result = func(*args, **kwargs)
    write_epochs.note_all(args)
    return become_cuda(result) if isinstance(kept, CudaTensor) else result
