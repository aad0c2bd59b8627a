"""Calls that come when a load says so: how many end in time, how late, and the memory meanwhile."""

import queue
import threading
import time
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from bench.measure.report import MeasurementFailed
from bench.streambox.footprint import granted_bytes
from bench.streambox.functions import BenchFunction, call_each, node
from bench.streambox.load_files import Arrival, arrivals
from tests.kit.nodes.node_thread import NodeThread
from tests.kit.nodes.worker_client import FunctionClient

LOAD_S, RUN_S = 0.25, 0.02
_SAMPLE_S = 0.2


class LoadResult(NamedTuple):
    """What became of the calls of one load; latency is from the arrival to the answer."""

    offered: int
    ended: int
    seconds: float
    median_s: float
    p99_s: float
    mean_bytes: float
    peak_bytes: int

    @property
    def calls_per_s(self) -> float:
        return self.ended / self.seconds


class _Function:
    """A function that answers its calls one after the other."""

    def __init__(self, function: BenchFunction, client: FunctionClient) -> None:
        self.waiting: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self.ended: list[tuple[float, float]] = []  # when, and how long after its arrival
        self.failure: BaseException | None = None
        self._function, self._client = function, client
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            while (came_s := self.waiting.get()) is not None:
                self._function.call(self._client)
                now_s = time.monotonic()
                self.ended.append((now_s, now_s - came_s))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self.failure = error
        finally:
            self._client.close()


def offered_load(
    runtime: str,
    load: str,
    made: Sequence[BenchFunction],
    gpu_mib: int,
    seconds: float,
    calls_per_s: float,
) -> LoadResult:
    """Offer one load to a node; calls that have not ended when it has are not counted."""
    coming = arrivals(load, len(made), seconds, calls_per_s, seed=len(made))
    with node(runtime, gpu_mib, LOAD_S, RUN_S) as it:
        clients = [function.client(it) for function in made]
        call_each(made, clients)
        serving = [_Function(*pair) for pair in zip(made, clients, strict=True)]
        begun_s = time.monotonic()
        samples = _offer(it, coming, serving, begun_s, seconds)
        for each in serving:
            while not each.waiting.empty():  # what has not begun is given up
                each.waiting.get()
            each.waiting.put(None)
        for each in serving:
            each.thread.join()
    for each in serving:
        if each.failure is not None:
            raise MeasurementFailed(f"{runtime}, {load}: {each.failure!r}") from each.failure
    ends_s = begun_s + seconds
    took = sorted(s for each in serving for ended_s, s in each.ended if ended_s <= ends_s)
    middle, late = (took[len(took) // 2], took[int(0.99 * len(took))]) if took else (seconds,) * 2
    return LoadResult(len(coming), len(took), seconds, middle, late, fmean(samples), max(samples))


def _offer(
    it: NodeThread,
    coming: Sequence[Arrival],
    serving: Sequence[_Function],
    begun_s: float,
    seconds: float,
) -> list[int]:
    """Hand the calls out when they come; the memory granted on the GPU, again and again."""
    samples: list[int] = []
    waiting = iter([*coming, Arrival(seconds, -1)])
    following = next(waiting)
    while following.function >= 0 or time.monotonic() < begun_s + seconds:
        now_s = time.monotonic() - begun_s
        while following.function >= 0 and following.at_s <= now_s:
            serving[following.function].waiting.put(begun_s + following.at_s)
            following = next(waiting)
        if now_s >= len(samples) * _SAMPLE_S:
            samples.append(it.run(granted_bytes))
        time.sleep(max(0.0, min(following.at_s - now_s, 0.01)))
    return samples
