"""The template of several workers of one process: started, ordered to fork; workers are adopted."""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gateway_ext.runtime.template import example_calls
from gateway_ext.runtime.template.fork_line import VARIABLE, ForkReport, OrderLine

_SET_ADOPTING = 36
_LOOK_S = 0.2


class ForkedServer:
    """A worker that the template has forked; this process is its parent by now."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.line = line
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative if a signal ended the process; None while it lives."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._status = -signal.SIGKILL  # somebody else has taken note of its end
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        """No effect once the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class _Run(NamedTuple):
    """A template process: its line, and its id."""

    line: OrderLine
    pid: int


class WorkerTemplate:
    """Started with the first worker; once it cannot be used, workers are started anew."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        handler: Path,
        stopping: Callable[[], bool],
    ) -> None:
        self._command = command
        self._environment = dict(environment)
        self._name = environment.get("HOSTNAME", "")
        self._has_examples = (handler / example_calls.FILE).is_file()
        self._stopping = stopping
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._over = False

    def fork(self, listener: int) -> ForkedServer | None:
        """A worker that serves this socket; None if it must be started anew."""
        with self._lock:
            if self._over:
                return None
            try:
                return self._worker(self._run or self._started(), listener)
            except OSError as error:
                if not self._stopping():
                    _log(f"workers are started without a template: {error}")
                self._end()
                return None

    def close(self) -> None:
        """End the template; its workers go on."""
        with self._lock:
            self._end()

    def _started(self) -> _Run:
        ctypes.CDLL(None).prctl(_SET_ADOPTING, 1, 0, 0, 0)
        line = OrderLine()
        with line.theirs as theirs:
            os.set_inheritable(theirs.fileno(), True)
            environment = {**self._environment, VARIABLE: str(theirs.fileno())}
            pid = os.posix_spawnp(self._command[0], list(self._command), environment)
        why = self._report(line, "imported", "failed").why
        self._run = _Run(line, pid)
        if self._has_examples and not why:
            self._run = self._warmed(self._run)
        return self._run

    def _warmed(self, before: _Run) -> _Run:
        """The template that has made the example calls; the one before if they failed."""
        warm = self._forked(before, "warm at once", [])
        try:
            is_warm = self._report(warm.line, "warmed", "failed").state == "warmed"
        except OSError as error:
            _log(f"the example calls were not made: {error}")
            is_warm = False
        other = before if is_warm else warm
        other.line.close()
        return warm if is_warm else before

    def _worker(self, run: _Run, listener: int) -> ForkedServer:
        line, pid = self._forked(run, "worker", [listener])
        if pid == run.pid:  # it cannot be forked, and has become the worker
            self._end()
        return ForkedServer(pid, line.socket)

    def _forked(self, run: _Run, kind: str, descriptors: Sequence[int]) -> _Run:
        line = run.line.order(kind, self._name, {}, descriptors)
        pid = self._report(line, "began").pid
        line.confirm()
        return _Run(line, pid)

    def _report(self, line: OrderLine, *expected: str) -> ForkReport:
        """The next report; OSError if none comes, and the line is closed then."""
        poll = select.poll()
        poll.register(line.socket, select.POLLIN)
        try:
            while not self._stopping():
                if poll.poll(_LOOK_S * 1000):
                    return line.received(*expected)
            raise OSError("all shall end")
        except OSError:
            line.close()
            raise

    def _end(self) -> None:
        self._over = True
        if self._run is not None:
            self._run.line.close()  # at which it ends
            self._run = None


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
