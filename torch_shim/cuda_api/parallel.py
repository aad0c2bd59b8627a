"""Programs for several GPUs on the only one: DataParallel, NCCL's collectives, and dlpack."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.nn.parallel import _functions, comm

from torch_shim.cuda_api import streams_and_events
from torch_shim.errors import UnsupportedCall
from torch_shim.patching import CUDA, redirect, set_attribute
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.handles import CudaTensor, Tensor
from torch_shim.tensors.mixed_devices import tensors_in

_REMEDY = "there is one GPU: leave it out"


def install() -> None:
    """Replace the functions that move data between GPUs, and those that export tensors."""
    redirect(_functions, "_get_stream", _get_stream)
    redirect(comm, "scatter", _scatter)
    for name in ("broadcast", "broadcast_coalesced", "reduce_add", "gather"):
        redirect(comm, name, _refuse)
    for owner in (torch, torch.utils.dlpack):
        redirect(owner, "from_dlpack", _from_dlpack)
        redirect(owner, "to_dlpack", _to_dlpack)
    _install_collectives()


def _get_stream(_native: object, device: torch.device) -> streams_and_events.Stream | None:
    return None if device.type == "cpu" else streams_and_events.default_stream()


def _scatter(
    _native: object, tensor: Tensor, devices: Sequence[Any] | None = None, *_: Any, **__: Any
) -> Any:
    if devices is None or len(devices) != 1:
        raise UnsupportedCall("torch.nn.parallel.comm.scatter to several GPUs", _REMEDY)
    return (tensor.to(CUDA),)


def _refuse(native: Callable[..., Any], *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedCall(f"torch.nn.parallel.comm.{native.__name__}", _REMEDY)


def _from_dlpack(native: Callable[..., Tensor], source: Any, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(source, CudaTensor):
        return source.detach()
    return native(source, *args, **kwargs)


def _to_dlpack(native: Callable[..., Any], tensor: Tensor) -> Any:
    if isinstance(tensor, CudaTensor):
        raise UnsupportedCall("to_dlpack of a CUDA tensor", "export tensor.cpu() instead")
    return native(tensor)


# torch.distributed with NCCL: the collectives of one process run by Gloo on the handles' storages.
#
# NCCL itself aborts a process that has no driver. A group of several processes is refused: they
# would share one GPU.

_COLLECTIVES = names(
    "_all_gather_base _reduce_scatter_base all_gather all_gather_coalesced all_gather_into_tensor "
    "all_reduce all_reduce_coalesced all_to_all all_to_all_single broadcast gather irecv isend "
    "recv reduce reduce_scatter reduce_scatter_tensor scatter send"
)
# These need the other process's call to end: to wait for them here could wait for ever.
_ANSWERED_ELSEWHERE = names("irecv isend")
# What torch calls a group whose backends it chooses itself: NCCL where there is a GPU.
_CHOSEN_BY_TORCH = "undefined"
_ONE_PROCESS = 'there is one GPU: start one process, or use the backend "gloo" with CPU tensors'


def _install_collectives() -> None:
    """Replace what makes groups, and have collectives note what they write to."""
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return
    core: Any = distributed.distributed_c10d
    redirect(core, "_new_process_group_helper", _new_group)
    for name in _COLLECTIVES & set(dir(core)):
        redirect(core, name, _collective)
        if hasattr(distributed, name):
            set_attribute(distributed, name, getattr(core, name))
    for owner in (core, distributed):
        native = getattr(owner, "ProcessGroupNCCL", None)
        if native is not None:
            set_attribute(owner, "ProcessGroupNCCL", _refusing_group(native))


def _new_group(
    native: Callable[..., Any],
    group_size: int,
    group_rank: int,
    ranks: list[int],
    backend: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    name = str(backend).lower()
    if "nccl" not in name and name != _CHOSEN_BY_TORCH:
        return native(group_size, group_rank, ranks, backend, *args, **kwargs)
    if group_size > 1:
        raise UnsupportedCall(f"a NCCL group of {group_size} processes", _ONE_PROCESS)
    core: Any = torch.distributed.distributed_c10d
    over_gloo = "gloo" if name == _CHOSEN_BY_TORCH else name.replace("nccl", "gloo")
    own = {**kwargs, "backend_options": None, "device_id": None}  # these are NCCL's
    group, store = native(group_size, group_rank, ranks, core.Backend(over_gloo), *args, **own)
    if group in core._world.pg_map:  # noqa: SLF001 - where get_backend() reads the name
        core._world.pg_map[group] = (core.Backend(backend), store)  # noqa: SLF001 - see above
    return group, store


def _collective(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = tensors_in((*args, *kwargs.values()))
    on_gpu = [tensor for tensor in given if isinstance(tensor, CudaTensor)]
    if not on_gpu:
        return native(*args, **kwargs)
    bring(on_gpu)
    if native.__name__ in _ANSWERED_ELSEWHERE:
        for tensor in on_gpu:
            write_epochs.marked(tensor).untracked = True
        return native(*args, **kwargs)
    try:
        work = native(*args, **kwargs)
        if work is not None:
            work.wait()  # a write that comes later would not be noted
        return work
    finally:
        write_epochs.note_all(on_gpu)


def _refusing_group(native: type) -> type:
    """Return a subclass, so that its options and isinstance() stay, that cannot be made."""

    def init(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedCall("torch.distributed.ProcessGroupNCCL", _ONE_PROCESS)

    return type(native.__name__, (native,), {"__init__": init, "__module__": native.__module__})
