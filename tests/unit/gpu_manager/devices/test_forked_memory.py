"""What a fork takes beyond its parent: by files as the system's, and of real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_manager.emulated.gpu import forked_bytes

SIZE_BYTES = 64 << 20


def add(proc: Path, pid: int, parent: int, kib: int, command: bytes = b"python\0server\0") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    folder.joinpath("status").write_text(f"Name:\tpy: thon\nPPid:\t{parent}\nRssAnon:\t {kib} kB\n")
    folder.joinpath("cmdline").write_bytes(command)


def test_fork_is_measured_beyond_its_parent(tmp_path: Path) -> None:
    add(tmp_path, 10, 1, 300)
    add(tmp_path, 11, 10, 420)
    add(tmp_path, 12, 10, 290)  # it has given back what its parent still has
    assert forked_bytes(11, tmp_path) == 120 * 1024
    assert forked_bytes(12, tmp_path) == 0


def test_nothing_is_known_without_the_process_that_it_was_forked_from(tmp_path: Path) -> None:
    add(tmp_path, 1, 0, 5, b"init\0")
    add(tmp_path, 11, 1, 420)  # an orphan
    add(tmp_path, 12, 9, 420)
    assert forked_bytes(11, tmp_path) is None
    assert forked_bytes(12, tmp_path) is None
    assert forked_bytes(13, tmp_path) is None


@pytest.mark.parametrize("status", ["", "PPid:\t10\n", "PPid:\t10\nRssAnon:\tmuch kB\n"])
def test_nothing_is_known_of_a_process_that_is_ending(status: str, tmp_path: Path) -> None:
    add(tmp_path, 10, 1, 300)
    add(tmp_path, 11, 10, 420)
    (tmp_path / "11/status").write_text(status)
    assert forked_bytes(11, tmp_path) is None


_FORKS = f"""
import os, signal
pid = os.fork()
if pid == 0:
    kept = bytearray(b"x") * {SIZE_BYTES}
    print(os.getpid(), flush=True)
    signal.pause()
os.waitpid(pid, 0)
print("over", flush=True)
signal.pause()
"""


def test_real_fork_is_measured_by_what_it_has_written() -> None:
    with subprocess.Popen([sys.executable, "-c", _FORKS], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        try:
            found = forked_bytes(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
        server.stdout.readline()
        after = forked_bytes(pid)
        server.kill()
    assert found is not None
    assert SIZE_BYTES <= found < 2 * SIZE_BYTES
    assert after is None
