"""The process that `torch_forks.py` has forked: it imports torch, and then forks on demand.

Run as `python -m tests.kit.programs.torch_process DESCRIPTOR`, its end of a socket pair. An order
is one message: JSON, the descriptor that takes the fork's status, its standard input and output,
and what else it is given.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpu_manager.worker import fork_server, sandbox
from tests.kit.programs.forked_programs import end_python
from torch_shim import start

_MOST_BYTES = 128 << 10  # of an order
_MOST_DESCRIPTORS = 8
_OWN = 3  # descriptors of every order: for its status, and its streams

_LIVING: dict[int, int] = {}  # the descriptors that take their statuses, by process


def main(descriptor: int) -> NoReturn:
    """Fork on demand until the test run hangs up."""
    wire = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        said, descriptors, _, _ = socket.recv_fds(wire, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not said:
            break
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            _be(json.loads(said), descriptors)
        _LIVING[pid] = descriptors[0]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for each in descriptors[1:]:
            os.close(each)
        wire.send(str(pid).encode())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for pid in _LIVING:
        os.kill(pid, signal.SIGKILL)
    sys.exit()


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = _LIVING.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody asks
                os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(descriptor)


def _be(order: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """In the new process: what was ordered, holding nothing else of the process that is forked."""
    status = 0
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        os.dup2(descriptors[1], 0)
        os.dup2(descriptors[2], 1)
        passed = list(descriptors[_OWN:])
        for opened in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            if opened > 2 and opened not in passed:
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.close(opened)
        if order:
            _be_program(order["source"], order["environment"])
        else:
            _be_fork_server(passed)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter reports what a program raises
        traceback.print_exc()
        status = 1
    end_python(status)


def _be_fork_server(descriptors: list[int]) -> None:
    """As `gpu_manager/worker/__main__.py`, which imports torch after that."""
    sandbox.die_with(os.getppid())
    missing = sandbox.isolate()
    keeps_stderr = bool(os.environ.get("GPUFAAS_WORKER_STDERR"))
    fork_server.main(descriptors, missing, emulated=True, keeps_stderr=keeps_stderr)


def _be_program(source: str, environment: dict[str, str]) -> None:
    """As a program under the import hook, which installs the shim once torch is imported."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start.after_import()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(int(sys.argv[1]))
