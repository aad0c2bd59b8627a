"""Peers beside us: each served by its own Python, and all its processes ended afterwards."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.measure.peers.peer_installs import (
    PeerSystem,
    PeerUnavailable,
    peer_python,
    peers_folder,
)
from gpufaas.stack.held_ports import HeldPort

_SCRIPTS = Path(__file__).parent
_START_S, _STOP_S = 180.0, 60.0
_READY = b"ready"


class PeerProgram(StrEnum):
    """What a peer serves; the value is the argument of its script."""

    NOOP = "noop"
    COMPUTING = "computing"
    ZIPF = "zipf"
    ZIPF_OVERLAPPED = "zipf-overlapped"


_ZIPF = frozenset({PeerProgram.ZIPF, PeerProgram.ZIPF_OVERLAPPED})


@dataclass(frozen=True, slots=True)
class ServedPeer:
    """A peer that answers, and its first process."""

    url: str
    pid: int


@contextmanager
def peer_server(peer: PeerSystem, program: str) -> Iterator[ServedPeer]:
    """Serve a program; all of the peer's processes end with the context.

    It is a PeerProgram, or `batched:...` of a peer that makes batches.
    """
    port = HeldPort().keep()
    script = str(_SCRIPTS / f"{peer.value}_server.py")
    log = peers_folder() / f"{peer}-{program}.log"
    with tempfile.TemporaryDirectory(prefix="peer") as scratch, log.open("wb") as errors:
        settings = [f"{name}={value}" for name, value in _settings(peer, program, scratch).items()]
        process = subprocess.Popen(
            ["/usr/bin/env", *settings, str(peer_python(peer)), script, str(program), str(port)],
            cwd=scratch,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            _wait(process, peer, log)
            yield ServedPeer(f"http://127.0.0.1:{port}", process.pid)
        finally:
            _end(process, peer)


def _settings(peer: PeerSystem, program: str, scratch: str) -> dict[str, str]:
    """The environment in which the peer does best; docs/benchmarks.md says why."""
    found = {
        "HOME": scratch,  # what a peer leaves at home goes with the folder
        "OMP_NUM_THREADS": "1",  # more threads do not pay for a model this small
        "BENTOML_DO_NOT_TRACK": "True",
    }
    if peer is PeerSystem.RAY:
        found |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        # HAProxy spreads calls without knowing which replica holds which model, so the
        # multiplexed program keeps Ray's own proxy, which does.
        if program not in _ZIPF:
            found |= _with_haproxy(scratch)
    return found


def _with_haproxy(scratch: str) -> dict[str, str]:
    return {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # only its end: nobody calls then
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{scratch}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": scratch,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{scratch}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(HeldPort().keep()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(HeldPort().keep()),
    }


def _wait(process: "subprocess.Popen[bytes]", peer: PeerSystem, log: Path) -> None:
    assert process.stdout is not None, "it was opened"
    patience_s = time.monotonic() + _START_S
    for line in process.stdout:
        if line.strip() == _READY:
            return
        if time.monotonic() > patience_s:
            break
    raise PeerUnavailable(f"{peer} did not start: see {log}")


def _end(process: "subprocess.Popen[bytes]", peer: PeerSystem) -> None:
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
