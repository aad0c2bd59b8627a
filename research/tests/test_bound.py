"""The lower bound: no schedule is below it, found by a policy or by trying every one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import TypeVar

import pytest

from cache_manager.model.ids import MIB, ModelId
from research.thesis.latency_bound import ModelRequests, average_latency_bound, least_waiting
from scheduler.composition import make_core
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware, SimModel
from scheduler.sim.study import Traffic
from scheduler.sim.workload import Arrivals, Pattern, Workload
from tests.kit.cores.life_lengths import life_length

Item = TypeVar("Item")
ROUNDING_S = 1e-9
# In order, out of order with queues of GPUs, and by weighing what a load costs. The bound is that
# of GPUs which load and run one after the other, as the thesis has it; beside and gain do both.
REPRESENTATIVE = ("lb", "lalbo3", "netgain")


def model(name: str, load_s: float = 3.0, run_s: float = 1.0, memory_mb: int = 1000) -> SimModel:
    return SimModel(ModelId(name), "small", memory_mb * MIB, load_s, run_s)


def workload(models: Sequence[SimModel], *arrivals: tuple[float, str]) -> Workload:
    return Workload(tuple(models), tuple((at_s, ModelId(name)) for at_s, name in arrivals))


# -- every schedule there is --------------------------------------------------------------------


class EverySchedule:
    """Tries all ways to share requests out to GPUs, to order them there, and what to evict.

    Given who is served where in which order, starting each as early as possible is best, so that
    all useful idling is tried too: a GPU waits for the next request in its order.
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


def _subsets(whole: frozenset[Item]) -> list[frozenset[Item]]:
    some = list(whole)
    return [frozenset(c) for size in range(len(some) + 1) for c in combinations(some, size)]


def tiny(seed: int) -> tuple[Workload, Hardware]:
    """Up to 6 requests for up to 3 models on up to 3 GPUs that cannot hold everything."""
    random = Random(seed)
    models = [
        model(
            f"m{number}",
            load_s=random.choice([0.0, random.random(), 1.5, 3.0 + 3.0 * random.random()]),
            run_s=random.choice([0.0, 0.2 + random.random(), 3.0 * random.random()]),
            memory_mb=random.choice([600, 1000, 1400]),
        )
        for number in range(random.randint(1, 3))
    ]
    span_s = random.choice([0.0, 3.0, 10.0, 40.0, 200.0])
    count = random.randint(2, 6)
    arrivals = sorted((random.random() * span_s, random.choice(models).id) for _ in range(count))
    hardware = Hardware(
        gpus=random.randint(1, 3),
        gpu_memory_mb=random.choice([1400, 1700, 2100]),
        overhead_s=random.choice([0.0, 0.3]),
    )
    return Workload(tuple(models), tuple(arrivals)), hardware


def test_bound_is_not_above_the_best_of_all_schedules() -> None:
    wrong = []
    for seed in range(life_length(600)):
        asked, hardware = tiny(seed)

        best_s = EverySchedule(asked, hardware).least_average_s()
        bound_s = average_latency_bound(asked, hardware)

        if not bound_s <= best_s + ROUNDING_S:
            wrong.append((seed, bound_s, best_s))

    assert wrong == []


def test_bound_counts_reloads_when_models_do_not_fit_together() -> None:
    models = [model("a", load_s=5.0), model("b", load_s=5.0)]
    asked = workload(models, *((8.0 * turn, "ab"[turn % 2]) for turn in range(6)))
    tight = Hardware(gpus=1, gpu_memory_mb=1000)

    best_s = EverySchedule(asked, tight).least_average_s()
    bound_s = average_latency_bound(asked, tight)

    # With room for both, nothing is loaded again.
    assert average_latency_bound(asked, replace(tight, gpu_memory_mb=2000)) < bound_s <= best_s


# -- where the best schedule is known -----------------------------------------------------------


def test_bound_is_zero_without_requests() -> None:
    assert average_latency_bound(workload([model("a")]), Hardware()) == 0.0


def test_bound_is_exact_for_one_request() -> None:
    asked = workload([model("a", load_s=3.0, run_s=1.0)], (5.0, "a"))

    assert average_latency_bound(asked, Hardware(overhead_s=0.2)) == pytest.approx(4.2)


@pytest.mark.parametrize("seed", range(5))
def test_bound_is_exact_for_one_model_on_one_gpu(seed: int) -> None:
    random = Random(seed)
    times = sorted(20.0 * random.random() for _ in range(6))
    asked = workload([model("a")], *((at_s, "a") for at_s in times))
    one = Hardware(gpus=1, overhead_s=0.1)

    best_s = EverySchedule(asked, one).least_average_s()

    assert average_latency_bound(asked, one) == pytest.approx(best_s)


def test_bound_is_exact_for_a_load_in_front_of_every_gpu() -> None:
    names = ("a", "b", "c")
    asked = workload([model(name) for name in names], *((0.0, name) for name in names))

    assert average_latency_bound(asked, Hardware(gpus=3)) == pytest.approx(4.0)


# -- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", REPRESENTATIVE)
def test_bound_is_not_above_any_policy(policy: str) -> None:
    wrong = []
    for arrivals, gpus, seed in product(Arrivals, (1, 3), range(3)):
        pattern = Pattern(arrivals, bunch_s=10.0 * seed if arrivals is Arrivals.BUNCHED else 0.0)
        asked = Traffic(working_set=8, rate=20 * gpus, minutes=2, pattern=pattern).build(seed)
        hardware = Hardware(gpus=gpus, gpu_memory_mb=4500 + 1000 * seed, overhead_s=0.2 * seed)

        run = Engine(make_core(policy), hardware, asked).run()

        bound_s = average_latency_bound(asked, hardware)
        latency_s = run.tally.summary().avg_latency_s
        if not 0.0 < bound_s <= latency_s + ROUNDING_S:
            wrong.append((arrivals, gpus, seed, bound_s, latency_s))

    assert wrong == []


# -- memory, and better hardware ------------------------------------------------


@pytest.mark.parametrize(
    "better",
    [Hardware(gpus=5, gpu_memory_mb=4500), Hardware(gpus=4, gpu_memory_mb=9000)],
    ids=["gpus", "memory"],
)
def test_bound_never_rises_with_better_hardware(better: Hardware) -> None:
    base = Hardware(gpus=4, gpu_memory_mb=4500)
    for seed in range(4):
        pattern = Pattern(Arrivals.POISSON)
        asked = Traffic(working_set=12, rate=60, minutes=2, pattern=pattern).build(seed)

        better_s = average_latency_bound(asked, better)

        assert better_s <= average_latency_bound(asked, base) + ROUNDING_S


def test_waiting_is_the_reloads_when_memory_is_too_small_to_keep_anything() -> None:
    demand = ModelRequests([0.0, 100.0, 200.0], run_s=1.0, load_s=2.0, memory_bytes=10)

    assert least_waiting([demand], memory_bytes=10) == pytest.approx(2.0)
    assert least_waiting([demand], memory_bytes=0) > 5.0
