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

from gpu_manager.runtimes.workers.fork_client import ForkServer

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
        order = {"source": source, "environment": dict(environment)}
        try:
            self.process = _forks().fork(order, (heard, said))
        finally:
            os.close(heard)
            os.close(said)
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)

    def close(self) -> int:
        """Hang up, wait for its end, and return its status."""
        with suppress(BrokenPipeError):  # it did not hear all that was said
            self.stdin.close()
        status = self.process.wait()
        self.stdout.close()
        return status


@contextmanager
def forked_fork_servers() -> Iterator[None]:
    """Meanwhile runtimes of this process with emulated GPUs have such processes as fork servers."""

    def launch(_: ForkServer, devices: str, passed: Sequence[int]) -> ForkedProcess:
        assert devices == "cpu", "an emulated GPU's"
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            return _forks().fork({}, (nothing, nothing), passed)
        finally:
            os.close(nothing)

    with mock.patch.object(ForkServer, "_launch", launch):
        yield


class _Forks:
    """The process that is forked."""

    def __init__(self) -> None:
        self._wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _FORKED, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(
        self, order: Mapping[str, object], streams: tuple[int, int], passed: Sequence[int] = ()
    ) -> ForkedProcess:
        """A fork that does this, with these standard streams."""
        with ExitStack() as stack:
            status, written = os.pipe()
            stack.callback(os.close, written)
            on_failure = stack.enter_context(ExitStack())
            on_failure.callback(os.close, status)
            with self._asking:
                given = [written, *streams, *passed]
                socket.send_fds(self._wire, [json.dumps(order).encode()], given)
                pid = self._wire.recv(64)
            assert pid, "the process that is forked has ended"
            on_failure.pop_all()
            return ForkedProcess(int(pid), status)

    def close(self) -> None:
        self._wire.close()
        self._process.wait()


_FOUND: list[_Forks] = []
_STARTING = threading.Lock()


def _forks() -> _Forks:
    """The one of this test run's process, started when it is needed."""
    with _STARTING:
        if not _FOUND:
            _FOUND.append(_Forks())
            atexit.register(_FOUND[0].close)
        return _FOUND[0]
