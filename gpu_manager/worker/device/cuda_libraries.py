"""What is done ahead so that CUDA's libraries need no rights later, which a worker gives up.

Those that they open when they are first used are opened once, in the process that forks workers: a
worker may not see the files any more, and cuDNN would fail in the middle of a call. What they open
and allocate for themselves, they do while the worker is warmed.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_MAPS = Path("/proc/self/maps")
# What torch 2.11 says of a lack of memory where NVML does not answer, which it asks who has it.
_NO_ACCOUNT = "NVML_SUCCESS"

# Opened by name by those that torch is linked with: parts of cuDNN, the compiler of kernels that
# are made at run time, solvers and transforms.
_OPENED_LATER = (
    "libcudnn_*.so*",
    "libnvrtc.so*",
    "libnvrtc-builtins.so*",
    "libnvJitLink.so*",
    "libcusolver.so*",
    "libcufft.so*",
)
# Initialises CUDA where it is opened, after which no process may be forked that uses CUDA.
OF_LINEAR_ALGEBRA = "libtorch_cuda_linalg.so"


def open_libraries(maps: Path = _MAPS, names: Sequence[str] = _OPENED_LATER) -> list[str]:
    """Open them; the names of those opened. One that cannot be is not there for cuDNN either."""
    opened = []
    for folder in _folders(maps):
        for pattern in names:
            for library in sorted(folder.glob(pattern)):
                try:
                    ctypes.CDLL(str(library))
                except OSError:
                    continue
                opened.append(library.name)
    return opened


def use_libraries(device: torch.device) -> None:
    """Use each library of CUDA once, so that it opens and allocates while it has the rights to."""
    open_libraries(names=[OF_LINEAR_ALGEBRA])
    functional = torch.nn.functional
    small = torch.ones(16, 16, device=device)
    half = small.half()
    functional.conv2d(small.view(1, 1, 16, 16), small[:3, :3].reshape(1, 1, 3, 3))
    functional.conv2d(half.view(1, 1, 16, 16), half[:3, :3].reshape(1, 1, 3, 3))
    functional.linear(half, half, half[0])
    heads = half.view(1, 1, 16, 16)
    functional.scaled_dot_product_attention(heads, heads, heads)
    torch.rand(4, device=device).sort()
    (small @ small).sum().item()


def meet_shortage(cuda: Any, device: torch.device, total_bytes: int) -> None:
    """Ask for more than the GPU has, so that torch opens NVML while it has the rights to.

    No limit is changed for it: an image may be given memory meanwhile. `cuda` is torch's module.
    """
    try:
        address = cuda.caching_allocator_alloc(2 * total_bytes, device)
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
    else:  # by a driver that takes the host's memory where the GPU's is short
        cuda.caching_allocator_delete(address)


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was short, be it that torch could not say who has it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_ACCOUNT in str(error)
    )


def _folders(maps: Path) -> list[Path]:
    """The folders of CUDA's libraries that this process has opened already."""
    found: dict[Path, None] = {}
    for line in maps.read_text(encoding="utf-8").splitlines():
        _, slash, path = line.partition("/")
        library = Path(slash + path)
        if library.name.startswith(("libcudnn", "libcublas", "libcudart", "libtorch_cuda")):
            found[library.parent] = None
    return list(found)
