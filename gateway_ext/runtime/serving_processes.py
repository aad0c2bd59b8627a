"""Several processes that serve one socket: started, replaced when they die, stopped together."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from gateway_ext.runtime.function_server import FunctionServer
from gateway_ext.runtime.runtime_settings import RuntimeSettings

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
_LIVED_LONG_S = 60.0
_LOOK_S = 0.2


class Workers:
    """The parent: it serves health until the first worker serves everything."""

    def __init__(
        self, settings: RuntimeSettings, listener: socket.socket, command: Sequence[str]
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._command = command
        self._stopping = threading.Event()
        self._lobby = FunctionServer(settings)
        self._lobby_open = True
        self._lock = threading.Lock()

    def run(self) -> int:
        """Serve until SIGTERM; returns the exit code."""
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
        self._stopping.wait()
        self._close_lobby()
        for keeper in keepers:
            keeper.join()
        self._listener.close()
        return 0

    def _keep(self, number: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            status = self._live_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_s > _LIVED_LONG_S:
                pause_s = _FIRST_PAUSE_S
            _log(f"worker {number} ended with {status}; another one follows in {pause_s:g} s")
            self._stopping.wait(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _live_once(self) -> int:
        ours, theirs = socket.socketpair()
        listener = self._listener.fileno()
        arguments = ["--worker", str(theirs.fileno()), "--listener", str(listener), "--parent"]
        with subprocess.Popen(
            [*self._command, *arguments, str(os.getpid())], pass_fds=(theirs.fileno(), listener)
        ) as process:
            theirs.close()
            with ours, suppress(OSError):  # the worker has died: `_wait` returns its status
                if self._is_ready(ours):
                    # First, so that no call meets the lobby's 503 once a worker has served one.
                    self._close_lobby()
                    ours.sendall(b"G")
            return self._wait(process)

    def _is_ready(self, worker: socket.socket) -> bool:
        """Wait until the worker can serve; False if it ends before, or all of them shall end."""
        worker.settimeout(_LOOK_S)
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                return bool(worker.recv(1))
        return False

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        while not self._stopping.is_set():
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        process.terminate()
        try:
            return process.wait(self._settings.stop_timeout_s + 2)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _close_lobby(self) -> None:
        with self._lock:
            if self._lobby_open:
                self._lobby_open = False
                self._lobby.stop()
                self._lobby.wait()


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
