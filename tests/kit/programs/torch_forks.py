"""Processes that have imported torch: forks of one process of this test run.

The import takes two to three seconds of a processor, longer than most tests compute. What a test
needs as users start it (a daemon, `gpufaas exec`, a function's process) is not for this.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import pytest

from gpu_manager.runtimes.fork_client import ForkServer

_FORKED = "tests.kit.programs.torch_process"


class ForkedProcess:
    """One of them, with as much of `subprocess.Popen` as a runtime uses."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status  # a pipe's end
        self._ended: int | None = None
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        """Its status, once it has ended."""
        with self._reading:
            if self._ended is None and self._is_said(within_ms=0):
                said = os.read(self._status, 16)
                os.close(self._status)
                self._ended = int(said) if said else -signal.SIGKILL  # with the one it is from
            return self._ended

    def wait(self) -> int:
        """Its status, which is waited for; for one thread."""
        if self.poll() is None:
            self._is_said(within_ms=None)
        ended = self.poll()
        assert ended is not None, "its status can be read"
        return ended

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _is_said(self, within_ms: int | None) -> bool:
        asked = select.poll()
        asked.register(self._status, select.POLLIN)
        return bool(asked.poll(within_ms))


class ForkedProgram:
    """A program under the shim, like `python -c SOURCE` with pipes for what it hears and says."""

    def __init__(self, source: str, environment: Mapping[str, str]) -> None:
        (heard, ours_in), (ours_out, said) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        order = {"source": source, "environment": dict(environment)}
        with _closing(heard, said):
            self.process = _torch_process().fork(order, (heard, said))

    def close(self) -> int:
        """Hang up, wait for its end, and return its status. What it says must be read before."""
        with suppress(BrokenPipeError):  # it did not hear all that was said
            self.stdin.close()
        status = self.process.wait()
        self.stdout.close()
        return status


@pytest.fixture(scope="module", autouse=True)
def quick_fork_servers() -> Iterator[None]:
    """Runtimes of a test's own process, with emulated GPUs, have such processes as fork servers.

    For a folder's conftest.py; a module whose subject is the fork server replaces this fixture.
    """
    started = ForkServer._launch  # noqa: SLF001 - it is replaced
    found = _torch_process()  # before a test counts descriptors, or a node's loop would wait

    def launch(
        server: ForkServer, devices: str, passed: Sequence[int]
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        if devices != "cpu":
            return started(server, devices, passed)
        nothing = os.open(os.devnull, os.O_RDWR)
        with _closing(nothing):
            return found.fork({}, (nothing, nothing), passed)

    with mock.patch.object(ForkServer, "_launch", launch):
        yield


class _TorchProcess:
    """The process that is forked."""

    def __init__(self) -> None:
        self._wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        descriptor = str(theirs.fileno())
        with theirs:
            self._process = subprocess.Popen(
                # As `gpu_manager/worker/__main__.py` and the shim set it before torch is imported.
                ["env", "GOMP_SPINCOUNT=10000", sys.executable, "-m", _FORKED, descriptor],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)
        assert self._wire.recv(64), "the process that is forked has ended"

    def fork(
        self, order: Mapping[str, object], streams: tuple[int, int], passed: Sequence[int] = ()
    ) -> ForkedProcess:
        """A fork that does this, with these standard streams."""
        status, written = os.pipe()
        with _closing(written), ExitStack() as on_failure:
            on_failure.callback(os.close, status)
            pid = self._asked(json.dumps(order).encode(), [written, *streams, *passed])
            on_failure.pop_all()
        return ForkedProcess(pid, status)

    def close(self) -> None:
        """Hang up: it ends, and all of its forks with it."""
        self._wire.close()
        self._process.wait()

    def _asked(self, order: bytes, descriptors: Sequence[int]) -> int:
        with self._asking:
            try:
                socket.send_fds(self._wire, [order], descriptors)
                answer = self._wire.recv(64)
            except BaseException:
                self._wire.close()  # or the next one would take this one's answer for its own
                raise
        assert answer, "the process that is forked has ended"
        return int(answer)


_STARTED: list[_TorchProcess] = []
_STARTING = threading.Lock()


def _torch_process() -> _TorchProcess:
    """The one of this test run's process, started when it is needed."""
    with _STARTING:
        if not _STARTED:
            _STARTED.append(_TorchProcess())
        return _STARTED[0]


@contextmanager
def _closing(*descriptors: int) -> Iterator[None]:
    try:
        yield
    finally:
        for each in descriptors:
            os.close(each)
