"""Several processes that serve one socket: started, replaced when they die, stopped together.

They are forks of one template where the handler can be forked, else each is started anew.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gateway_ext.runtime.server import FunctionServer
from gateway_ext.runtime.settings import RuntimeSettings
from gateway_ext.runtime.template.worker_template import WorkerTemplate

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0  # one call may have ended a worker
_LIVED_LONG_S = 60.0
_LOOK_S = 0.2
_SIGNAL_STATUS = 128  # and the signal's number, as shells have it


class WorkerProcess(Protocol):
    """A worker, however it came to be."""

    pid: int

    def poll(self) -> int | None:
        """None while the process lives."""

    def send_signal(self, number: int, /) -> None:
        """No effect once the process has ended."""


class Workers:
    """The parent: it serves health until the first worker serves everything."""

    def __init__(
        self,
        settings: RuntimeSettings,
        listener: socket.socket,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._command = command
        self._stopping = threading.Event()
        self._status, self._why = 0, ""
        self._was_ready = False  # any worker
        self._lobby = FunctionServer(settings)
        self._lobby_open = True
        self._lock = threading.Lock()
        self._template = WorkerTemplate(
            command, environment, Path(settings.handler), self._stopping.is_set
        )
        self._children: set[int] = set()
        self._reaping = threading.Lock()

    def run(self) -> int:
        """Serve until SIGTERM, or until a worker fails before any is ready; the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        signal.signal(signal.SIGINT, lambda *_: self._stopping.set())
        self._lobby.start()
        self._lobby.listen(self._listener.dup())
        keepers = [
            threading.Thread(target=self._keep, args=(number,), daemon=True)
            for number in range(self._settings.workers)
        ]
        for keeper in keepers:
            keeper.start()
        while not self._stopping.wait(_LOOK_S):
            self._reap_others()
        self._close_lobby()
        for keeper in keepers:
            keeper.join()
        self._template.close()
        self._listener.close()
        if self._why:  # the last line of all workers
            _log(self._why)
        return self._status

    def _keep(self, number: int) -> None:
        pause_s, killed = _FIRST_PAUSE_S, False
        while not self._stopping.is_set():
            started_s = time.monotonic()
            status = self._live_once()
            if self._stopping.is_set():
                return
            if not self._was_ready and (status > 0 or killed):  # others would fail, too
                # Without a word if the worker chose its end: its last line says why.
                self._status = status if status > 0 else _SIGNAL_STATUS - status
                if status < 0:
                    self._why = f"worker {number} {_described(status)} again before it was ready"
                self._stopping.set()
                return
            killed = status < 0
            if time.monotonic() - started_s > _LIVED_LONG_S:
                pause_s = _FIRST_PAUSE_S
            _log(f"worker {number} {_described(status)}; another one follows in {pause_s:g} s")
            self._stopping.wait(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _live_once(self) -> int:
        process, line = self._begun()
        with line, suppress(OSError):  # the worker has died: `_wait` returns its status
            if self._is_ready(line):
                self._was_ready = True
                # First, so that no call meets the lobby's 503 once a worker has served one.
                self._close_lobby()
                line.sendall(b"G")
        try:
            return self._wait(process)
        finally:
            with self._reaping:
                self._children.discard(process.pid)

    def _begun(self) -> tuple[WorkerProcess, socket.socket]:
        """A worker and the line to it: a fork of the template, else started anew."""
        forked = self._template.fork(self._listener.fileno())
        with self._reaping:
            if forked is not None:
                self._children.add(forked.pid)
                return forked, forked.line
            process, line = self._started_anew()
            self._children.add(process.pid)
            return process, line

    def _started_anew(self) -> tuple[WorkerProcess, socket.socket]:
        ours, theirs = socket.socketpair()
        listener = self._listener.fileno()
        arguments = ["--worker", str(theirs.fileno()), "--listener", str(listener), "--parent"]
        with theirs:
            process = subprocess.Popen(
                [*self._command, *arguments, str(os.getpid())], pass_fds=(theirs.fileno(), listener)
            )
        return process, ours

    def _is_ready(self, worker: socket.socket) -> bool:
        """Wait until the worker can serve; False if it ends before, or all of them shall end."""
        worker.settimeout(_LOOK_S)
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                return bool(worker.recv(1))
        return False

    def _wait(self, process: WorkerProcess) -> int:
        while not self._stopping.wait(_LOOK_S / 4):
            if (status := process.poll()) is not None:
                return status
        process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + self._settings.stop_timeout_s + 2
        while (status := process.poll()) is None:
            if time.monotonic() > deadline_s:
                process.send_signal(signal.SIGKILL)
            time.sleep(_LOOK_S / 10)
        return status

    def _reap_others(self) -> None:
        """Take note of the end of adopted processes: templates, and what workers have left."""
        with self._reaping, suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._children:
                    return  # its keeper does so
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _close_lobby(self) -> None:
        with self._lock:
            if self._lobby_open:
                self._lobby_open = False
                self._lobby.stop()
                self._lobby.wait()


def _described(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    with suppress(ValueError):  # Python has no name for most real-time signals
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
