"""The redirected GPU, and the spellings of its name that users may write."""

import functools
from typing import TypeAlias

import torch

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

DeviceLike: TypeAlias = torch.device | str | int | None

# What torch raises for an error of the driver; older versions have no class for it.
_InvalidDevice: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)

# Module attributes, to save lookups: every patched call uses them.
_mode = torch._C._get_dispatch_mode  # noqa: SLF001 - there is no cheap public check
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001 - see above


def tracing_fakes() -> bool:
    """Return True while this thread propagates fake tensors: patched functions then do nothing."""
    return _mode(_FAKE) is not None


@functools.lru_cache(maxsize=256)
def names_cuda(device: DeviceLike) -> bool:
    """Return True for any spelling of the redirected GPU; raise for any other CUDA device."""
    if device is None:
        return False
    parsed = CUDA if device == 0 and isinstance(device, int) else torch.device(device)
    if parsed.type != "cuda":
        return False
    if parsed.index not in {None, 0}:
        raise _InvalidDevice(f"CUDA error: invalid device ordinal ({parsed}: there is 1 GPU)")
    return True
