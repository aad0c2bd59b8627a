"""Calls that do nothing, through real processes: ours, and our peers' beside them."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bench import gateway_functions as functions
from bench import peers
from bench.gateway_load import Figures, for_so_long, request
from bench.gateway_up import NotUp, Up, up
from bench.idle import by_name, machine_cpu_s, tree
from bench.peers import Peer

CLIENTS = (1, 32, 256)
GPUS = 8
_SETTLE_S, _WARM_S = 3.0, 1.0
_WARM_CALLS, _PAUSE_S = 200, 0.1


class System(StrEnum):
    """Who answers."""

    PLAIN = "gpufaas, plain function"
    GPU = "gpufaas, GPU function"
    RAY = "Ray Serve"
    LITSERVE = "LitServe"


OURS = (System.PLAIN, System.GPU)


@dataclass(slots=True)
class Measured:
    """What one system did in one round, by the number of clients; CPU seconds a call, by part.

    `others` is how many cores were taken by what has nothing to do with the measurement.
    """

    figures: dict[int, Figures] = field(default_factory=dict)
    cpu_s: dict[int, dict[str, float]] = field(default_factory=dict)
    others: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    call: bytes
    pid: int


def one_round(system: System, seconds: float) -> Measured:
    """Start it, warm it, and put every number of clients on it for so long."""
    found = Measured()
    with _target(system) as target:
        time.sleep(_SETTLE_S)  # workers that are made ahead
        for_so_long(target.url, target.call, 8, _WARM_S)
        for clients in CLIENTS:
            before, machine_s = by_name(tree(target.pid)), machine_cpu_s()
            began_s = time.monotonic()
            run = for_so_long(target.url, target.call, clients, seconds)
            took_s = time.monotonic() - began_s  # longer, where the last answers come late
            machine_s = machine_cpu_s() - machine_s
            after = by_name(tree(target.pid))
            spent_s = {
                name: after[name].cpu_s - before[name].cpu_s for name in after if name in before
            }
            calls = max(1.0, run.rate * took_s)
            found.figures[clients] = run
            found.cpu_s[clients] = {name: own_s / calls for name, own_s in spent_s.items()}
            ours_s = sum(spent_s.values()) + run.generator * took_s
            found.others[clients] = max(0.0, machine_s - ours_s) / took_s
    return found


@contextmanager
def stack(*options: str) -> Iterator[Up]:
    """`gpufaas up` in a folder that is gone afterwards, with the builds of the bench."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        root = Path(name)
        root.chmod(0o755)  # functions are other users
        functions.write_builds(root / "build")
        with up(root, options) as running:
            yield running


def learned(running: Up, name: str, body: bytes) -> None:
    """Call a GPU function until the gateway has leases for its calls; NotUp if that never comes."""
    leased = 0
    for _ in range(_WARM_CALLS):
        before = running.cache()
        running.call(name, body)
        after = running.cache().since(before)
        leased = leased + 1 if after.hits + after.misses else 0
        if leased > 1:
            return
        time.sleep(_PAUSE_S)
    raise NotUp(f"{name}: no lease in {_WARM_CALLS} calls")


@contextmanager
def _target(system: System) -> Iterator[_Target]:
    if system is System.RAY:
        with peers.serving(Peer.RAY, "noop") as served:
            yield _Target(served.url, request("/"), served.pid)
    elif system is System.LITSERVE:
        with peers.serving(Peer.LITSERVE, "noop") as served:
            yield _Target(served.url, request("/predict"), served.pid)
    else:
        with stack("--devices", f"cpu:{GPUS}", "--gpu-memory", "1GiB") as running:
            yield _ours(running, system)


def _ours(running: Up, system: System) -> _Target:
    deployment = functions.plain() if system is System.PLAIN else functions.gpu()
    name = str(deployment["service"])
    running.deploy(deployment)
    running.ready(name)
    if system is System.GPU:
        learned(running, name, functions.WARM)
        before = running.cache()
        running.call(name, b"")
        if not running.cache().since(before).hits:
            raise NotUp(f"{name}: a call that does nothing was given no lease")
    return _Target(running.url, request(f"/function/{name}"), running.pid)
