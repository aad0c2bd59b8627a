"""What changes a program's numbers beside its inputs: each call begins with exactly its own modes.

Torch keeps autocast, the gradient mode and vmap's levels for each thread. They are set, never only
left: a program that fails, or leaves in another order than it entered, restores what it should not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gpu_manager.worker.call_errors import ContextLost
from gpu_manager.worker.program.checks.plain_values import begin_call
from torch_shim.wire.arithmetic import Arithmetic, arithmetic_in_force

_functorch = torch._C._functorch  # noqa: SLF001 - torch has no public way to ask
_fills = torch._C._get_deterministic_fill_uninitialized_memory  # noqa: SLF001 - the public one takes longer
_DTYPES = (("cpu", torch.bfloat16), ("cuda", torch.float16))  # of autocast where nobody names one


class Mode(NamedTuple):
    """What changes the numbers that a program computes, beside its inputs."""

    autocast: torch.dtype | None
    default_dtype: torch.dtype
    arithmetic: Arithmetic = Arithmetic()


@contextmanager
def computing(device: torch.device, mode: Mode) -> Iterator[None]:
    """Compute in exactly this mode, whatever this thread ran before, and leave nothing entered.

    ContextLost where the process computes otherwise: other calls may rely on that.
    """
    _check_process(mode)
    leave_modes()
    begin_call()
    try:
        if mode.autocast is not None:
            autocast = torch.autocast(device.type, mode.autocast, cache_enabled=False)
            autocast.__enter__()  # type: ignore[no-untyped-call] # torch gives it no types
        yield
    finally:
        leave_modes()


def leave_modes() -> None:
    """Leave all that the thread's programs entered.

    Autocast keeps no casts here: only those of tensors that need gradients would be kept, which
    inputs and weights do not, and they would be the process's until some thread left autocast.
    """
    while _functorch.get_dynamic_layer_stack_depth():
        _functorch.pop_dynamic_layer_stack()
    for kind, dtype in _DTYPES:
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    entered = torch.autocast_increment_nesting()
    for _ in range(entered):
        torch.autocast_decrement_nesting()
    for _ in range(-entered):
        torch.autocast_increment_nesting()
    torch._C._set_grad_enabled(False)  # noqa: SLF001 - the public one makes an object


def _check_process(mode: Mode) -> None:
    if torch.is_inference_mode_enabled():
        raise ContextLost("the thread is in inference mode", of_program=False)
    in_force = torch.get_default_dtype(), arithmetic_in_force(), _fills()
    if in_force != (mode.default_dtype, mode.arithmetic, True):
        raise ContextLost(f"the process computes with {in_force}", of_program=False)
