"""Ray Serve and LitServe beside us: installed into environments of their own, served, and asked."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpufaas.local.held_ports import HeldPort

FOLDER = Path("out/peers")
_SCRIPTS = Path(__file__).parent
_START_S, _STOP_S = 180.0, 15.0
_READY = b"ready"
# No reports to their makers, and no metrics.
_QUIET = (
    "RAY_USAGE_STATS_ENABLED=0",
    "RAY_SERVE_LOG_TO_STDERR=0",
    "RAY_DEDUP_LOGS=0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0",
)


class PeerSystem(StrEnum):
    """A system to compare gpufaas with."""

    RAY = "ray"
    LITSERVE = "litserve"


_WANTED = {PeerSystem.RAY: "ray[serve]", PeerSystem.LITSERVE: "litserve"}


class PeerUnavailable(Exception):
    """A peer could not be installed or started, with the reason."""


@dataclass(frozen=True, slots=True)
class ServedPeer:
    """A peer that answers, and its first process."""

    url: str
    pid: int


def install(peer: PeerSystem) -> str:
    """Have it in out/peers; its version. NoPeer where the network does not give it."""
    folder = FOLDER / peer
    python = folder / "bin" / "python"
    made = folder / "made"
    if not made.exists():
        print(f"installing {_WANTED[peer]} into {folder} ...", flush=True)
        _ran(peer, [sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _ran(peer, [*pip, _WANTED[peer]])
        made.touch()
    asked = f"from importlib.metadata import version; print(version({peer.value!r}))"
    return _ran(peer, [str(python), "-c", asked]).strip()


@contextmanager
def peer_server(peer: PeerSystem, what: str) -> Iterator[ServedPeer]:
    """Serve what the peer's script calls `what`; all its processes end with the context."""
    port = HeldPort().keep()
    python = str(FOLDER.absolute() / peer / "bin" / "python")
    script = str(_SCRIPTS / f"{peer.value}_server.py")
    log = FOLDER / f"{peer}-{what}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            ["/usr/bin/env", *_QUIET, python, script, what, str(port)],
            cwd=FOLDER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        _wait(process, peer, log)
        yield ServedPeer(f"http://127.0.0.1:{port}", process.pid)
    finally:
        assert process.stdin is not None, "it was opened"
        process.stdin.close()  # the server's sign to end
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            print(f"{peer} does not end and is killed", flush=True)
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None, "it was opened"
        process.stdout.close()


def _wait(process: "subprocess.Popen[bytes]", peer: PeerSystem, log: Path) -> None:
    assert process.stdout is not None, "it was opened"
    patience_s = time.monotonic() + _START_S
    for line in process.stdout:
        if line.strip() == _READY:
            return
        if time.monotonic() > patience_s:
            break
    raise PeerUnavailable(f"{peer} did not start: see {log}")


def _ran(peer: PeerSystem, command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise PeerUnavailable(f"{peer} cannot be installed here: {' '.join(last)}")
    return done.stdout
