"""The calls of CUDA's runtime library that torch does not offer, or whose errors it leaves set.

A call that fails leaves its error behind for its thread, and the next check after a kernel launch
would raise it there as the launch's own: whoever expects a failure here takes the error back.
"""

import ctypes
from pathlib import Path
from typing import Any

SUCCESS = 0
# Flags of cudaHostRegister, and the attribute that says whether the last one is supported.
PORTABLE, READ_ONLY = 1, 8
_READ_ONLY_SUPPORTED = 113


class CudaRuntime:
    """CUDA's runtime as this process has loaded it; without one nothing can be pinned."""

    def __init__(self, library: Any = None) -> None:
        self._library = library

    def pin(self, address: int, size: int, flags: int = PORTABLE) -> bool:
        """Whether these pages of the host are pinned now; they stay as they are where not."""
        if self._library is None or not size:
            return False
        places = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(flags)
        return self._done(self._library.cudaHostRegister(*places))

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        if self._library is not None:
            self._done(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def pins_read_only(self, device: int = 0) -> bool:
        """Whether pages that may not be written can be pinned; many x86 machines cannot."""
        if self._library is None:
            return False
        value = ctypes.c_int(0)
        asked = self._library.cudaDeviceGetAttribute(
            ctypes.byref(value), ctypes.c_int(_READ_ONLY_SUPPORTED), ctypes.c_int(device)
        )
        return self._done(asked) and value.value == 1

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
    if hasattr(whole, "cudaGetLastError"):
        return CudaRuntime(whole)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")
        if "libcudart" in path[2]:
            return CudaRuntime(ctypes.CDLL(f"/{path[2]}"))
    return CudaRuntime()
