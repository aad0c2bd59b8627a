"""Calls that do nothing, through real processes: our stack's, and those of its peers."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from bench.gateway import bench_functions
from bench.measure.call_costs import CallCosts, call_costs
from bench.measure.load_figures import http_post, load_for
from bench.measure.peers import peer_servers
from bench.measure.peers.peer_servers import PeerSystem
from bench.measure.process_usage import process_tree, usage_by_part
from bench.measure.whole_stack import StackNotReady, WholeStack, whole_stack

CLIENTS = (1, 32, 256)
GPUS = 8
_SETTLE_S, _WARM_S = 3.0, 1.0
_WARM_CALLS, _PAUSE_S = 200, 0.1


class Answering(StrEnum):
    """The system that answers the calls."""

    PLAIN = "gpufaas, plain function"
    GPU = "gpufaas, GPU function"
    RAY = "Ray Serve"
    LITSERVE = "LitServe"


OURS = (Answering.PLAIN, Answering.GPU)


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    call: bytes
    pid: int


def one_round(system: Answering, seconds: float) -> dict[int, CallCosts]:
    """Start a system, warm it up, and put every number of clients on it for these seconds."""
    found = {}
    with _target(system) as target:
        time.sleep(_SETTLE_S)  # until the workers of the pool are made
        load_for(target.url, [target.call], 8, _WARM_S)
        for clients in CLIENTS:
            put_load = partial(load_for, target.url, [target.call], clients, seconds)
            found[clients] = call_costs(put_load, partial(_usage, target.pid))
    return found


def _usage(pid: int) -> dict[str, float]:
    parts = usage_by_part(process_tree(pid))
    return {name: part.processor_s for name, part in parts.items()}


@contextmanager
def stack_of_builds(*options: str) -> Iterator[WholeStack]:
    """`gpufaas up` in a temporary folder, with the builds of the bench's functions."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        root = Path(name)
        root.chmod(0o755)  # functions are other users
        bench_functions.write_builds(root / "build")
        with whole_stack(root, options) as running:
            yield running


def call_until_leased(running: WholeStack, name: str, body: bytes) -> None:
    """Call a GPU function until the gateway has leases for its calls, or StackFailed."""
    leased = 0
    for _ in range(_WARM_CALLS):
        before = running.cache()
        running.call(name, body)
        after = running.cache().since(before)
        leased = leased + 1 if after.hits + after.misses else 0
        if leased > 1:
            return
        time.sleep(_PAUSE_S)
    raise StackNotReady(f"{name}: no lease in {_WARM_CALLS} calls")


@contextmanager
def _target(system: Answering) -> Iterator[_Target]:
    if system is Answering.RAY:
        with peer_servers.peer_server(PeerSystem.RAY, "noop") as served:
            yield _Target(served.url, http_post("/"), served.pid)
    elif system is Answering.LITSERVE:
        with peer_servers.peer_server(PeerSystem.LITSERVE, "noop") as served:
            yield _Target(served.url, http_post("/predict"), served.pid)
    else:
        with stack_of_builds("--devices", f"cpu:{GPUS}", "--gpu-memory", "1GiB") as running:
            yield _ours(running, system)


def _ours(running: WholeStack, system: Answering) -> _Target:
    deployment = bench_functions.plain() if system is Answering.PLAIN else bench_functions.gpu()
    name = str(deployment["service"])
    running.deploy(deployment)
    running.ready(name)
    if system is Answering.GPU:
        call_until_leased(running, name, bench_functions.WARM)
        before = running.cache()
        running.call(name, b"")
        if not running.cache().since(before).hits:
            raise StackNotReady(f"{name}: a call that does nothing got no lease")
    return _Target(running.url, http_post(f"/function/{name}"), running.pid)
