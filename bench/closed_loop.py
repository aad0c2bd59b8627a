"""`python -m bench.closed_loop`: 16 models on 4 GPUs, clients that wait for answers, the bare core.

Without processes, and so without the machine's noise: the core on virtual time, GPUs that copy and
compute. A lease costs its slot some time besides the run, before it and after it.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from statistics import median

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from scheduler.composition import make_core
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.events import (
    Event,
    GpuJoined,
    LeaseReleased,
    ModelLoaded,
    ModelRegistered,
    RequestArrived,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import ANY_GPU_TYPE, GpuSpec, ModelSpec, Request, RequestId, SlotId
from tests.kit.live.live_load import ZIPF_GPUS, ZIPF_ROOM, zipf, zipf_models

_LOAD_S, _RUN_S, _BEFORE_S, _AFTER_S = 0.25, 0.02, 0.006, 0.004
_WARMING, _SEEDS = 150, range(1, 8)


@dataclass
class ClosedLoop:
    """One run of one policy: as many calls at a time as there are clients."""

    policy: str
    parameters: Mapping[str, float]
    order: list[ModelId]
    now: float = 0.0
    begun_s: float = 0.0
    hits: int = 0
    latencies: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._core = make_core(self.policy, parameters=self.parameters)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._arrived_s: dict[RequestId, float] = {}
        self._measured = {RequestId(f"r{n}") for n in range(_WARMING, len(self.order))}
        self._computed_s: dict[SlotId, float] = {}
        for number in range(ZIPF_GPUS):
            spec = GpuSpec(GpuId(f"g{number}"), NodeId("n"), ZIPF_ROOM * 100 * MIB)
            self._handle(GpuJoined(spec))
        for model in zipf_models():
            times = {Tier.DISK: _LOAD_S}, ((1, ANY_GPU_TYPE, _RUN_S),)
            self._handle(ModelRegistered(ModelSpec(model.id, 100 * MIB, *times)))

    def run(self, clients: int) -> tuple[float, float, float, float]:
        """Calls a second, hit ratio, median and 99th percentile in ms, after the warming."""
        for _ in range(clients):
            self._call()
        while self._due:
            self.now, _, happen = heappop(self._due)
            happen()
        measured = sorted(self.latencies)
        rate = len(measured) / (self.now - self.begun_s)
        p50_s, p99_s = median(measured), measured[int(len(measured) * 0.99)]
        return rate, self.hits / len(measured), 1e3 * p50_s, 1e3 * p99_s

    def _call(self) -> None:
        number = len(self._arrived_s)
        if number == len(self.order):
            return
        if number == _WARMING:
            self.begun_s = self.now
        request = Request(RequestId(f"r{number}"), "f", (self.order[number],))
        self._arrived_s[request.id] = self.now
        self._handle(RequestArrived(request))

    def _handle(self, event: Event) -> None:
        load_s = 0.0
        for action in self._core.handle(event, self.now):
            if isinstance(action, Prepare):
                (load,) = action.loads
                load_s = _LOAD_S
                there = ModelLoaded(action.gpu, load.model, load_s, load.source)
                self._at(self.now + load_s, partial(self._handle, there))
            elif isinstance(action, Dispatch):
                self.hits += action.hit and action.requests[0] in self._measured
                wait_s = _BEFORE_S if action.hit else max(_BEFORE_S, load_s)
                self._at(self.now + wait_s, partial(self._compute, action))

    def _compute(self, action: Dispatch) -> None:
        begins_s = max(self.now, self._computed_s.get(action.slot, 0.0))
        done_s = self._computed_s[action.slot] = begins_s + _RUN_S
        self._at(done_s + _AFTER_S, partial(self._done, action))

    def _done(self, action: Dispatch) -> None:
        if action.requests[0] in self._measured:
            self.latencies.append(self.now - self._arrived_s[action.requests[0]])
        self._handle(RunFinished(action.slot, action.models[0], 1, _RUN_S))
        self._handle(LeaseReleased(action.lease))
        self._handle(SlotFreed(action.slot, action.lease))
        self._call()

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heappush(self._due, (at_s, next(self._numbers), happen))


def main() -> None:
    """One line for each policy: medians of seven seeds."""
    parser = argparse.ArgumentParser(prog="bench.closed_loop", description=__doc__)
    parser.add_argument("policies", nargs="*", default=["lalbo3", "netgain", "beside"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--calls", type=int, default=500, help="that are measured")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    parameters = {name: float(value) for name, _, value in (s.partition("=") for s in options.set)}
    models = zipf_models()
    print("calls/s, hit ratio, median and 99th percentile in ms")
    for policy in options.policies:
        runs = [
            ClosedLoop(policy, parameters, zipf(models, _WARMING + options.calls, seed))
            for seed in _SEEDS
        ]
        found = [each.run(options.clients) for each in runs]
        rate, ratio, p50_ms, p99_ms = (median(values) for values in zip(*found, strict=True))
        print(f"{policy:<8} {rate:6.1f} {ratio:.3f} {p50_ms:4.0f} {p99_ms:4.0f}")


if __name__ == "__main__":
    main()
