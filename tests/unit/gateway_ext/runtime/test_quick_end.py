"""What still runs when a function's process ends, and what does not."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from gateway_ext.runtime.template.forks import end_process

class Left:
    def __del__(self):
        print("taken apart")

left = Left()
left.itself = left
released = threading.Event()
atexit.register(print, "registered first")
atexit.register(print, "registered last")
threading.Thread(target=lambda: (released.wait(), print("thread"))).start()
print("end", end=" ")
released.set()
{more}
end_process(3)
"""


@pytest.mark.parametrize("more", ["", "sys.stderr.close()"])
def test_threads_end_and_what_is_registered_runs_when_the_process_ends(more: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=more)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n") == ["end thread", "registered last", "registered first", ""]


def test_process_ends_at_once_with_a_running_thread_and_nobody_who_reads_its_output() -> None:
    program = (
        "import threading; from gateway_ext.runtime.template.forks import end_at_once; "
        "threading.Thread(target=threading.Event().wait).start(); "
        "print('unread'); end_at_once(3)"
    )
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-E", "-c", program],  # `print` keeps its text: nothing says otherwise
            stdout=writes,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (3, b"")
