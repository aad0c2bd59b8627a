"""The lower bound: no schedule is below it, found by a policy or by trying every one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from cache_manager.model import MIB, ModelId
from scheduler import policies
from scheduler.core import make_core
from scheduler.sim.bound import average_latency_bound
from scheduler.sim.bound_copies import Demand, least_waiting
from scheduler.sim.catalogue import SimModel
from scheduler.sim.engine import Engine, Hardware
from scheduler.sim.study import Load
from scheduler.sim.workload import Arrivals, Pattern, Workload

ROUNDING = 1.0 + 1e-9
each_policy = pytest.mark.parametrize("policy", policies.available())


def model(name: str, load_s: float = 3.0, run_s: float = 1.0, memory_mb: int = 1000) -> SimModel:
    return SimModel(ModelId(name), "small", memory_mb * MIB, load_s, run_s)


def workload(models: Sequence[SimModel], *arrivals: tuple[float, str]) -> Workload:
    return Workload(tuple(models), tuple((at_s, ModelId(name)) for at_s, name in arrivals))


# -- every schedule there is --------------------------------------------------------------------


class EverySchedule:
    """Tries all ways to share requests out to GPUs, to order them there, and what to evict.

    Given who is served where in which order, starting each as early as possible is best, so that
    all useful idling is tried too: a GPU waits for whoever is next in its order.
    """

    def __init__(self, asked: Workload, hardware: Hardware) -> None:
        by_id = {model.id: model for model in asked.models}
        self._requests = [(arrived_s, by_id[name]) for arrived_s, name in asked.arrivals]
        self._hardware = hardware

    def least_average_s(self) -> float:
        everyone = frozenset(range(len(self._requests)))
        alone = {some: self._on_one_gpu(some, 0.0, frozenset()) for some in _subsets(everyone)}
        best = alone
        for _ in range(self._hardware.gpus - 1):
            best = {
                some: min(best[some - here] + alone[here] for here in _subsets(some))
                for some in alone
            }
        return best[everyone] / len(everyone)

    def _on_one_gpu(
        self, waiting: frozenset[int], free_s: float, held: frozenset[SimModel]
    ) -> float:
        """The least sum of latencies when one GPU, free from then, serves all these."""
        if not waiting:
            return 0.0
        return min(
            self._served_next(number, waiting, free_s, kept)
            for number in sorted(waiting)
            for kept in self._kept(held, self._requests[number][1])
        )

    def _served_next(
        self, number: int, waiting: frozenset[int], free_s: float, kept: frozenset[SimModel]
    ) -> float:
        arrived_s, wanted = self._requests[number]
        load_s = 0.0 if wanted in kept else wanted.load_s
        done_s = max(free_s, arrived_s) + load_s + self._hardware.overhead_s + wanted.run_s
        rest_s = self._on_one_gpu(waiting - {number}, done_s, kept | {wanted})
        return done_s - arrived_s + rest_s

    def _kept(self, held: frozenset[SimModel], wanted: SimModel) -> Iterator[frozenset[SimModel]]:
        """What may stay when this model is to be served: all on a hit, else what leaves room."""
        if wanted in held:
            yield held
            return
        room_bytes = self._hardware.gpu_memory_mb * MIB - wanted.memory_bytes
        for kept in _subsets(held):
            if sum(model.memory_bytes for model in kept) <= room_bytes:
                yield kept


def _subsets[T](whole: frozenset[T]) -> list[frozenset[T]]: ...
