"""Opens the libraries that CUDA's own libraries open when they are first used.

Done once, in the process that forks workers: a worker that has given up its rights may not see the
files any more, and cuDNN would fail in the middle of a call.
"""

import ctypes
from pathlib import Path

# Opened by name by those that torch is linked with: parts of cuDNN, the compiler of kernels that
# are made at run time, solvers and transforms.
_OPENED_LATER = (
    "libcudnn_*.so*",
    "libnvrtc.so*",
    "libnvrtc-builtins.so*",
    "libnvJitLink.so*",
    "libcusolver.so*",
    "libcufft.so*",
    "libtorch_cuda_linalg.so",
)


def open_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Open them; the names of those opened. One that cannot be is not there for cuDNN either."""
    opened = []
    for folder in _folders(maps):
        for pattern in _OPENED_LATER:
            for library in sorted(folder.glob(pattern)):
                try:
                    ctypes.CDLL(str(library))
                except OSError:
                    continue
                opened.append(library.name)
    return opened


def _folders(maps: Path) -> list[Path]:
    """The folders of CUDA's libraries that this process has opened already."""
    found: dict[Path, None] = {}
    for line in maps.read_text(encoding="utf-8").splitlines():
        _, slash, path = line.partition("/")
        library = Path(slash + path)
        if library.name.startswith(("libcudnn", "libcublas", "libcudart", "libtorch_cuda")):
            found[library.parent] = None
    return list(found)
