"""Processes and threads choose their names, which need not be text; who looks at them goes on."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.liveness import process_look
from gateway_ext.providers.process import processes
from tests.kit.places import ROOT

NAMED = """
from pathlib import Path
Path("/proc/self/comm").write_bytes(b"\\xff) \\xfe")
print("named", flush=True)
input()
"""
NAMED_THREAD = """
import threading
from pathlib import Path
from gateway_ext.runtime.template import forks
begun = threading.Event()
def work():
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    comm.write_bytes("twelve bytes\u00fc\u00fc".encode())  # of 16: the last one is cut off
    begun.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
begun.wait()
print(ascii(forks.obstacle({0, 1, 2})))
"""


@pytest.fixture
def badly_named() -> Iterator[int]:
    """The id of a process with such a name, which leads a session."""
    with subprocess.Popen(
        [sys.executable, "-c", NAMED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        yield process.pid
        process.communicate(b"\n")


def test_of_a_process_with_a_name_that_is_no_text_all_else_is_known(badly_named: int) -> None:
    assert processes.sessions()[badly_named] == [badly_named]
    assert any(badly_named in pids for pids in processes.by_user().values())
    assert processes.usage([badly_named]).resident_bytes > 0
    look = process_look(Path("/proc", str(badly_named)))
    assert look is not None
    assert look.state in "RSD"


def test_a_thread_whose_name_was_cut_within_a_character_is_an_obstacle_to_forks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMED_THREAD], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "twelve bytes\\xfc\\ufffd" in done.stdout
