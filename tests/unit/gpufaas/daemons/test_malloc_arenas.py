"""malloc of a process whose threads share one interpreter."""

import platform
import subprocess
import sys

import pytest

# Each arena reserves 64 MiB of addresses, and each stack 8.
_THREADS = """
import sys, threading
from pathlib import Path
from gpufaas.daemon_process import share_one_arena
if sys.argv[1] == "shared":
    share_one_arena()
def reserved():
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) >> 10 for row in rows if row.startswith("VmSize"))
before, at_once = reserved(), threading.Barrier(9)
def allocate():
    kept = [bytes(1000) for _ in range(100)]
    at_once.wait()
    at_once.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
at_once.wait()
print(reserved() - before)
at_once.wait()
"""


def reserved_mib(how: str) -> int:
    command = [sys.executable, "-c", _THREADS, how]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_threads_have_no_arenas_of_their_own() -> None:
    assert reserved_mib("shared") < 200
    assert reserved_mib("apart") > 400
