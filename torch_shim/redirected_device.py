"""Which devices are ours: the one redirected GPU, and how users spell it."""

import functools
from typing import TypeAlias

import torch

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

DeviceLike: TypeAlias = torch.device | str | int | None

# Attributes, so that a name may be bound at once: they are asked at every patched call.
_mode = torch._C._get_dispatch_mode  # noqa: SLF001 - the one cheap question
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001 - see above


def tracing_fakes() -> bool:
    """True while fake tensors are propagated on this thread: patched functions then step aside."""
    return _mode(_FAKE) is not None


@functools.lru_cache(maxsize=256)
def names_cuda(device: DeviceLike) -> bool:
    """True for any spelling of our GPU; a CUDA device that does not exist raises."""
    if device is None:
        return False
    parsed = CUDA if device == 0 and isinstance(device, int) else torch.device(device)
    if parsed.type != "cuda":
        return False
    if parsed.index not in {None, 0}:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({parsed}: there is 1 GPU)")
    return True
