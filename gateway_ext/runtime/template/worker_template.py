"""The template of several workers of one process: its side that orders forks, and adopts them."""

import array
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gateway_ext.runtime.template import example_calls
from gateway_ext.runtime.template.template_process import VARIABLE

_SET_ADOPTING = 36
_PASS_CREDENTIALS, _SENT_CREDENTIALS = 16, 2
_CREDENTIALS = struct.Struct("=iII")
_MOST_BYTES = 8 << 10
_LOOK_S = 0.2


class ForkedServer:
    """A worker that the template has forked; this process is its parent by now."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.line = line
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it lives."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._status = -signal.SIGKILL  # somebody else has taken note of its end
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class _Run(NamedTuple):
    """A template process: its line, and its id."""

    line: socket.socket
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
                if self._run is None:
                    self._run = self._started()
                return self._worker(self._run, listener)
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
        ours, theirs = _line()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            environment = {**self._environment, VARIABLE: str(theirs.fileno())}
            pid = os.posix_spawnp(self._command[0], list(self._command), environment)
        why = self._report(ours, "imported", "failed")[1]
        run = _Run(ours, pid)
        return run if why or not self._has_examples else self._warmed(run)

    def _warmed(self, before: _Run) -> _Run:
        """The template that has made the example calls; the one before if they failed."""
        line, pid = self._forked(before, "warm at once", [])
        try:
            if self._report(line, "warmed", "failed")[0] == "failed":
                return before
        except OSError as error:
            _log(f"the example calls were not made: {error}")
            return before
        before.line.close()
        return _Run(line, pid)

    def _worker(self, run: _Run, listener: int) -> ForkedServer:
        line, pid = self._forked(run, "worker", [listener])
        if pid == run.pid:  # it cannot be forked, and has become the worker
            self._over, self._run = True, None
            run.line.close()
        return ForkedServer(pid, line)

    def _forked(
        self, run: _Run, kind: str, descriptors: Sequence[int]
    ) -> tuple[socket.socket, int]:
        ours, theirs = _line()
        order = {"kind": kind, "name": self._name, "environment": {}}
        rights = array.array("i", [theirs.fileno(), *descriptors])
        with theirs:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            run.line.sendmsg([json.dumps(order).encode()], ancillary)
        pid = self._report(ours, "began")[2]
        ours.send(b"go")
        return ours, pid

    def _report(self, line: socket.socket, *expected: str) -> tuple[str, str, int]:
        """The state, the reason and the sender of the next report; OSError if none comes."""
        line.settimeout(_LOOK_S)
        while not self._stopping():
            try:
                data, ancillary, _, _ = line.recvmsg(
                    _MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except TimeoutError:
                continue
            sent = [one for _, kind, one in ancillary if kind == _SENT_CREDENTIALS]
            fields = json.loads(data) if data else {}
            if fields.get("state") not in expected or not sent:
                raise OSError("the template has ended")
            return fields["state"], fields["why"], _CREDENTIALS.unpack(sent[0])[0]
        raise OSError("all shall end")

    def _end(self) -> None:
        self._over = True
        if self._run is not None:
            self._run.line.close()  # at which it ends
            self._run = None


def _line() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, _PASS_CREDENTIALS, 1)
    return ours, theirs


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
