"""The process that `torch_forks.py` has forked: it imports torch, and then forks on demand.

Run as `python -m tests.kit.programs.torch_process DESCRIPTOR`, its end of a socket pair. An order
is one message: JSON, the descriptor that takes the fork's status, its standard input and output,
and what else it is given.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gateway_ext.runtime.template.forks import end_process
from gpu_manager.worker import fork_server, sandbox
from tests.kit.programs.forked_programs import run_and_end
from tests.kit.programs.warm_process import READY
from torch_shim import start

_MOST_BYTES = 128 << 10  # of an order
_MOST_DESCRIPTORS = 8
_OWN_DESCRIPTORS = 3  # of every order: for its status, and its streams

_STATUSES: dict[int, int] = {}  # the descriptors that take them, by process


def main(descriptor: int) -> NoReturn:
    """Fork on demand until the test run hangs up. No fork outlives this process."""
    wire = socket.socket(fileno=descriptor)
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()  # a fork's collections then write to none of the pages that it shares
    wire.send(READY.encode())
    while True:
        said, descriptors, _, _ = socket.recv_fds(wire, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not said:
            end_process(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            _become(json.loads(said), descriptors, parent)
        _STATUSES[pid] = descriptors[0]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for each in descriptors[1:]:
            os.close(each)
        wire.send(str(pid).encode())


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = _STATUSES.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody asks
                os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(descriptor)


def _become(order: dict[str, Any], descriptors: Sequence[int], parent: int) -> NoReturn:
    """In the new process: do what was ordered, holding nothing else of the process it is from."""
    sandbox.die_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.setsid()
    os.dup2(descriptors[1], 0)
    os.dup2(descriptors[2], 1)
    passed = list(descriptors[_OWN_DESCRIPTORS:])
    for opened in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if opened > 2 and opened not in passed:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(opened)
    if order:
        run_and_end(lambda: _run_program(order["source"], order["environment"]))
    run_and_end(lambda: _serve_forks(passed))


def _serve_forks(descriptors: list[int]) -> None:
    """As `gpu_manager/worker/__main__.py`, which imports torch after that."""
    missing = sandbox.isolate()
    keeps_stderr = bool(os.environ.get("GPUFAAS_WORKER_STDERR"))
    fork_server.main(descriptors, missing, emulated=True, keeps_stderr=keeps_stderr)


def _run_program(source: str, environment: dict[str, str]) -> None:
    """As a program under the import hook, which installs the shim once torch is imported."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start.after_import()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(int(sys.argv[1]))
