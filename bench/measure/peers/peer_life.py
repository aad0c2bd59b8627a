"""When a peer's server is ready, and when it ends; imported by scripts that their peers run."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence

_ASK_S, _ANSWER_S, _STOP_S = 0.1, 5.0, 10.0
_OK = 200


def run_server(command: Sequence[str], ready_url: str) -> None:
    """Run a server as a process of its own until standard input ends."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)

    def ready() -> bool:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}")
        return answers(ready_url)

    _say_ready(ready)
    server.send_signal(signal.SIGINT)
    server.wait(_STOP_S)


def watch(end: signal.Signals, ready_url: str, body: bytes | None = None) -> None:
    """Send this process the signal once standard input ends; to be run in a thread."""
    _say_ready(lambda: answers(ready_url, body))
    os.kill(os.getpid(), end)


def answers(url: str, body: bytes | None = None) -> bool:
    """Whether a request is answered with 200; it is a POST if it has a body."""
    try:
        with urllib.request.urlopen(url, body, timeout=_ANSWER_S) as answer:
            return bool(answer.status == _OK)
    except OSError:
        return False


def _say_ready(ready: Callable[[], bool]) -> None:
    """Print `ready` once the server is, and return when standard input ends."""
    while not ready():
        time.sleep(_ASK_S)
    print("ready", flush=True)
    while os.read(0, 1024):  # `sys.stdin` has a lock, with which a server's children may be forked
        pass
