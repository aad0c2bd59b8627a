"""Which libraries are opened before rights are given up."""

from pathlib import Path

from gpu_manager.worker.device.cuda_libraries import open_libraries


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
