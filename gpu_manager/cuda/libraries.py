"""CUDA's libraries: opened before a worker gives up its rights, and calls that torch lacks.

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


# The calls of CUDA's runtime library that torch does not offer, or whose errors it leaves set.
#
# A call that fails leaves its error behind for its thread, and the next check after a kernel
# launch would raise it there as the launch's own: whoever expects a failure here takes the error
# back.

SUCCESS = 0
PORTABLE, READ_ONLY = 1, 8  # flags of cudaHostRegister
# Of memory that another process lends: its name's size, access from another GPU, where copies go.
TOKEN_BYTES = 64
_PEER_ACCESS, _BY_ADDRESS = 1, 4
_WAITS_FOR_NONE = ctypes.c_uint(1)  # cudaStreamNonBlocking: not even for the default stream


class _Token(ctypes.Structure):
    """The driver's name for an allocation, by which other processes open it."""

    _fields_ = (("content", ctypes.c_char * TOKEN_BYTES),)


class CudaRuntime:
    """CUDA's runtime as this process has loaded it; without one nothing can be pinned."""

    def __init__(self, library: Any = None, driver: Any = None) -> None:
        """`driver` is the library below the runtime, which alone knows where allocations begin."""
        self._library = library
        self._driver = driver

    def pin(self, address: int, size: int, flags: int = PORTABLE) -> bool:
        """Whether these pages of the host are pinned now; they stay as they are where not."""
        if self._library is None or not size:
            return False
        places = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(flags)
        return self._done(self._library.cudaHostRegister(*places))

    def unpin(self, address: int) -> None:
        if self._library is not None:
            self._done(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def allocation_of(self, address: int) -> tuple[int, int] | None:
        """Where the allocation begins in which this address of the GPU lies, and its size."""
        if self._driver is None or not address:
            return None
        begin, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
        places = ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address)
        if self._driver.cuMemGetAddressRange_v2(*places) != SUCCESS:
            return None
        return begin.value, size.value

    def lend(self, begin: int) -> bytes | None:
        """A name by which another process of this machine opens this allocation."""
        if self._library is None:
            return None
        token = _Token()
        asked = self._library.cudaIpcGetMemHandle(ctypes.byref(token), ctypes.c_void_p(begin))
        return bytes(token) if self._done(asked) else None

    def open_lent(self, token: bytes) -> int | None:
        """Where another process's allocation begins here; None if it cannot be opened."""
        if self._library is None or len(token) != TOKEN_BYTES:
            return None
        address = ctypes.c_void_p(0)
        named = _Token.from_buffer_copy(token)
        opened = self._library.cudaIpcOpenMemHandle(
            ctypes.byref(address), named, ctypes.c_uint(_PEER_ACCESS)
        )
        return address.value if self._done(opened) else None

    def close_lent(self, begin: int) -> None:
        """Undo `open_lent`."""
        if self._library is not None:
            self._done(self._library.cudaIpcCloseMemHandle(ctypes.c_void_p(begin)))

    def copy(self, target: int, source: int, size: int, stream: int) -> bool:
        """Whether a copy between addresses of GPUs is on its way, on this stream."""
        if self._library is None:
            return False
        places = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
        how = ctypes.c_int(_BY_ADDRESS), ctypes.c_void_p(stream)
        return self._done(self._library.cudaMemcpyAsync(*places, *how))

    def make_stream(self) -> int:
        """A new stream, which waits for no other; RuntimeError if there is none to be had."""
        stream = ctypes.c_void_p(0)
        if self._library is None:
            raise RuntimeError("CUDA's runtime library is not loaded")
        made = self._library.cudaStreamCreateWithFlags(ctypes.byref(stream), _WAITS_FOR_NONE)
        if not self._done(made) or not stream.value:
            raise RuntimeError(f"CUDA makes no stream: error {made}")
        return stream.value

    def end_stream(self, stream: int) -> None:
        """End a stream of ours that nothing uses any more; 0 is none."""
        if self._library is not None and stream:
            self._done(self._library.cudaStreamDestroy(ctypes.c_void_p(stream)))

    def clear_error(self) -> int:
        """Take back the error that this thread's last failed call has left; its number."""
        return SUCCESS if self._library is None else int(self._library.cudaGetLastError())

    def _done(self, status: int) -> bool:
        if status != SUCCESS:
            self.clear_error()
        return status == SUCCESS


def loaded_runtime() -> CudaRuntime:
    """The library that torch has loaded: another copy of it would have errors of its own."""
    whole = ctypes.CDLL(None)
    driver = _loaded_driver()
    if hasattr(whole, "cudaGetLastError"):
        return CudaRuntime(whole, driver)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")
        if "libcudart" in path[2]:
            return CudaRuntime(ctypes.CDLL(f"/{path[2]}"), driver)
    return CudaRuntime()


def _loaded_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
