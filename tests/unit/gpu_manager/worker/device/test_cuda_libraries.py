"""Which libraries are opened before rights are given up."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_manager.cuda.libraries import open_libraries


def test_libraries_beside_those_of_cuda_are_opened_and_broken_ones_passed_over(
    tmp_path: Path,
) -> None:
    cudnn, other = tmp_path / "nvidia" / "lib", tmp_path / "other"
    for folder in (cudnn, other):
        folder.mkdir(parents=True)
        (folder / "libcudnn_cnn.so.9").write_bytes(b"no library")
    (cudnn / "libnvrtc.so.13").symlink_to(_a_library())
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 00:01 1 {cudnn}/libcudnn.so.9\n"
        f"7f02-7f03 r-xp 00000000 00:01 2 {other}/libm.so.6\n"
        "7f04-7f05 rw-p 00000000 00:00 0 [heap]\n"
    )
    assert open_libraries(maps) == ["libnvrtc.so.13"]


def _a_library() -> str:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "/libc.so" in line:
            return line[line.index("/") :]
    raise AssertionError("this process has no C library")


# A driver that says when it is asked for anything, and has nothing.
_DRIVER = r"""
#include <unistd.h>
extern "C" {
int cuInit(unsigned) { return write(1, "asked\n", 6), 100; }
int cuDriverGetVersion(int *found) { return *found = 13000, 0; }
int cuGetProcAddress(const char *, void **, int, unsigned long) { return cuInit(0); }
int cuGetProcAddress_v2(const char *, void **, int, unsigned long, int *) { return cuInit(0); }
}
"""
_OPENING = """
import torch
from gpu_manager.cuda import libraries
opened = libraries.open_libraries()
print("opened", len(opened), flush=True)
libraries.open_libraries(names=[libraries.OF_LINEAR_ALGEBRA])
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch for CUDA")
def test_libraries_that_are_opened_before_workers_are_forked_leave_cuda_alone(
    tmp_path: Path,
) -> None:
    """A process that has initialised CUDA forks none that can use it."""
    source = tmp_path / "driver.cpp"
    source.write_text(_DRIVER)
    compile_it = ["c++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(compile_it, check=True)
    command = ["env", f"LD_LIBRARY_PATH={tmp_path}", sys.executable, "-c", _OPENING]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    opened, *after = ran.stdout.splitlines()
    assert int(opened.removeprefix("opened ")) > 3
    assert "asked" in after  # so that the driver would have been before, too
