"""Calls a second of many functions on one GPU of the same memory, by processes and by streams."""

import random
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.measure.report import MeasurementFailed
from bench.streambox.functions import BenchFunction, call_each, node
from bench.streambox.offered_load import LOAD_S, RUN_S
from tests.kit.nodes.node_thread import NodeThread

_CALLERS = 4


class CallRate(NamedTuple):
    """What closed-loop callers got."""

    calls_per_s: float
    hit_ratio: float
    p99_s: float


def call_rate(
    runtime: str, made: Sequence[BenchFunction], gpu_mib: int, seconds: float, seed: int
) -> CallRate:
    """Call functions that are drawn at random, evenly, after each was called once."""
    times: list[tuple[float, float]] = []
    failures: list[BaseException] = []
    with node(runtime, gpu_mib, LOAD_S, RUN_S) as it:
        senders = [function.client(it) for function in made]
        call_each(made, senders)
        before, from_s = it.run(lambda node: node.status().counts), time.monotonic()
        ends_s = from_s + seconds
        threads = [
            threading.Thread(target=_calls, args=(it, made, seed + n, ends_s, times, failures))
            for n in range(_CALLERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = it.run(lambda node: node.status().counts)
        for sender in senders:
            sender.close()
    if failures:
        raise MeasurementFailed(f"{runtime}: {failures[0]!r}") from failures[0]
    took = sorted(took_s for ended_s, took_s in times if ended_s < ends_s)
    hits = after.hits - before.hits
    placed = hits + after.misses - before.misses
    if not took or not placed:
        raise MeasurementFailed(f"{runtime}: no call ended in {seconds:g} s")
    return CallRate(len(took) / seconds, hits / placed, took[int(0.99 * len(took))])


def _calls(
    it: NodeThread,
    made: Sequence[BenchFunction],
    seed: int,
    ends_s: float,
    times: list[tuple[float, float]],
    failures: list[BaseException],
) -> None:
    chance = random.Random(seed)
    clients = {function.number: function.client(it, sends=False) for function in made}
    try:
        while time.monotonic() < ends_s:
            function = chance.choice(made)
            began_s = time.monotonic()
            function.call(clients[function.number])
            times.append((time.monotonic(), time.monotonic() - began_s))
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
        failures.append(error)
    finally:
        for client in clients.values():
            client.close()
