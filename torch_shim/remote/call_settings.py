"""What of this process, beside the inputs, changes the numbers that a program computes."""

from typing import Any

import torch

from torch_shim.errors import RemoteFailure
from torch_shim.remote.transfer import NAME_OF
from torch_shim.wire.arithmetic import Arithmetic, arithmetic_in_force
from torch_shim.wire.protocol import FailureKind

_USUAL = Arithmetic()


def autocast_to_send() -> list[Any] | None:
    """The data type and whether casts are cached; None without autocast."""
    if not torch.is_autocast_enabled("cuda"):
        return None
    return [NAME_OF[torch.get_autocast_dtype("cuda")], torch.is_autocast_cache_enabled()]


def arithmetic_to_send() -> list[Any] | None:
    """The settings to send with a call; RemoteFailure where no worker would compute so."""
    try:
        found = arithmetic_in_force()
    except RuntimeError as error:  # torch says so where both of its interfaces are used
        raise RemoteFailure(FailureKind.OPERATOR, f"tf32: {error}", {}) from error
    return None if found == _USUAL else list(found)


def dtype_to_send() -> str | None:
    """The default data type; None for the usual one."""
    dtype = torch.get_default_dtype()
    return None if dtype is torch.float32 else NAME_OF[dtype]
