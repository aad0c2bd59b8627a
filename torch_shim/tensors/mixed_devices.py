"""Finds the calls that CUDA refuses because their tensors are on two devices.

The rules are those of torch: element-wise operators take CPU tensors without dimensions beside GPU
tensors, indexes of GPU tensors may be on the CPU, copies go anywhere, and everything else wants one
device. Who asks says which tensors are on the GPU, so that the same rules serve handles and the
tensors without data that a trace follows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_shim.tensors.dispatch import names

Tensor = torch.Tensor
OnGpu = Callable[[Any], bool]


# No device matters to these, or the operator itself looks at it.
_ANYWHERE = names(
    "__get__ __set__ _foreach_copy_ _has_compatible_shallow_copy_type _pack_padded_sequence "
    "_pad_packed_sequence _weight_norm_interface as_nested_tensor as_tensor asarray can_cast "
    "copy_ cpu ctc_loss cuda data detach element_size expand_as full full_like get_device "
    "getattr grad is_same_size is_set_to is_tensor module_load new_full new_tensor promote_types "
    "reshape_as resize_as_ result_type set_ set_data size stride tensor tensor_split to "
    "type_as unsafe_chunk view_as"
)
# Every tensor among their arguments keeps its own device.
EACH = names("atleast_1d atleast_2d atleast_3d broadcast_tensors")
# The result is where the first argument is, whatever the others are.
FIRST = names(
    "__getitem__ __setitem__ copy_ expand_as getitem index index_put index_put_ reshape_as "
    "resize_as_ setitem tensor_split view_as"
)
_RECURRENT = names("gru lstm rnn_relu rnn_tanh")
_READ_INDEX = names("__getitem__ getitem index")
_WRITE_INDEX = names("__setitem__ setitem index_put index_put_")
# These want one device even of a tensor without dimensions.
_STRICT = names(
    "block_diag bucketize cat column_stack concat concatenate cross_entropy dstack embedding "
    "embedding_bag equal gather hstack index_add index_copy index_select isin meshgrid nll_loss "
    "put row_stack scatter scatter_add scatter_reduce searchsorted stack take take_along_dim vstack"
)
# Functions in Python, which leave arguments alone that have no elements.
_IGNORE_EMPTY = names("multi_head_attention_forward")
IN_PLACE = names(
    "__iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imatmul__ __imod__ __imul__ __ior__ "
    "__ipow__ __irshift__ __isub__ __itruediv__ __ixor__ iadd iand ifloordiv ilshift imatmul imod "
    "imul ior ipow irshift isub itruediv ixor"
)


def refuse(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], on_gpu: OnGpu) -> None:
    """Raise CUDA's error if the operator does not take these arguments' devices together."""
    if name in _READ_INDEX or name in _WRITE_INDEX:
        _refuse_index(name, args, kwargs, on_gpu)
    elif conflicts(name, args, kwargs, on_gpu):
        raise _two_devices(name)


def conflicts(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], on_gpu: OnGpu) -> bool:
    """Whether CUDA refuses these arguments of an operator that does not index."""
    if name in _ANYWHERE or name in EACH:
        return False
    tensors = list(tensors_in((*args, *kwargs.values())))
    if name in _IGNORE_EMPTY:
        tensors = [tensor for tensor in tensors if tensor.numel()]
    on_cpu = [tensor for tensor in tensors if not on_gpu(tensor)]
    if not on_cpu or len(on_cpu) == len(tensors):
        return False
    if name in _RECURRENT:  # the sizes of a packed batch stay on the CPU
        return any(tensor.dtype is not torch.int64 for tensor in on_cpu)
    stem = name if name.endswith("__") else name.rstrip("_")
    if stem in _STRICT or any(tensor.dim() for tensor in on_cpu):
        return True
    return any(tensor is written for tensor in on_cpu for written in _written(name, args, kwargs))


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return [*(args[:1] if in_place else ()), kwargs.get("out")]


def _refuse_index(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], on_gpu: OnGpu) -> None:
    target, indices, *rest = (*args, *kwargs.values())
    if not isinstance(target, Tensor):
        return
    if name in _READ_INDEX and on_gpu(target):  # the indexes may be anywhere
        return
    parts = indices if isinstance(indices, list | tuple) else (indices,)
    tensors = list(tensors_in(parts))
    by_number = name not in {"index", "index_put", "index_put_"}
    chosen = [index for index in tensors if not (by_number and _is_number(index))]
    if not on_gpu(target) and any(map(on_gpu, chosen)):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    if name not in _WRITE_INDEX or not rest or not isinstance(rest[0], Tensor):
        return
    value = rest[0]
    copied = by_number and not chosen and not any(isinstance(part, list) for part in parts)
    single = value.dim() == 0 or (by_number and all(size == 1 for size in value.shape))
    if on_gpu(value) is not on_gpu(target) and not copied and not single:
        raise _two_devices(name)


def _is_number(index: Tensor) -> bool:
    """Whether an index is read as a number, wherever it is."""
    integer = not index.dtype.is_floating_point and index.dtype is not torch.bool
    return index.dim() == 0 and integer


def _two_devices(name: str) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:0 and cpu! (in {name})"
    )
