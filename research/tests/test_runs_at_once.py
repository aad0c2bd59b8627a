"""Simulated GPUs whose leases run at once, with slowdowns as in the paper's table."""

from random import Random

import pytest

from cache_manager.model.ids import MIB, ModelId
from research.grounds.paired_jobs import SharedHardware
from research.grounds.runs_at_once import SharingEngine
from research.interference.printed import interference_paper
from scheduler import policies
from scheduler.composition import make_core
from scheduler.model.events import ModelRegistered
from scheduler.model.values import METRICS, ModelSpec
from scheduler.sim.model_catalogue import SimModel
from scheduler.sim.workload import Workload

PAPER = interference_paper()
A, B = ModelId("a"), ModelId("b")


def sim_model(name: str, run_s: float, gib: float = 1.0) -> SimModel:
    return SimModel(ModelId(name), "one", int(gib * 1024 * MIB), 0.0, run_s)


def table() -> dict[tuple[ModelId, ModelId], float]:
    """Table IV; the pairs without memory are not in it."""
    return {(ModelId(one), ModelId(other)): value for (one, other), value in PAPER.table.items()}


def ended_s(hardware: SharedHardware, workload: Workload, policy: str = "lb") -> float:
    """When the last request of a workload is done, all of whose models' use is known."""
    core = make_core(policy)
    random = Random(7)
    for model in workload.models:
        features = {name: random.random() for name in METRICS}
        core.handle(ModelRegistered(ModelSpec(model.id, features=features)), 0.0)
    summary = SharingEngine(core, hardware, workload).run().tally.summary()
    assert summary.requests == len(workload.arrivals)
    return summary.makespan_s


def makespan_s(policy: str, seed: int, *, slowdowns: dict[tuple[ModelId, ModelId], float]) -> float:
    """Of the paper's five applications, 12 jobs each in random order, on two GPUs in pairs."""
    random = Random(seed)
    peaks = {"vgg16": 8.9, **PAPER.peak_gb}
    models = tuple(
        sim_model(name, random.uniform(2.0, 10.0), peaks.get(name, 3.0)) for name in PAPER.trained
    )
    jobs = [model.id for model in models for _ in range(12)]
    random.shuffle(jobs)
    hardware = SharedHardware(2, int(PAPER.gpu_gb * 1024), slowdowns=slowdowns)
    return ended_s(hardware, Workload(models, tuple((0.0, job) for job in jobs)), policy)


def pair(
    slowdowns: dict[tuple[ModelId, ModelId], float], *arrivals: tuple[float, ModelId]
) -> float:
    models = (sim_model("a", 4.0), sim_model("b", 8.0))
    return ended_s(SharedHardware(1, 8192, slowdowns=slowdowns), Workload(models, arrivals))


def test_runs_that_do_not_disturb_each_other_end_as_if_they_were_alone() -> None:
    assert pair({}, (0.0, A), (0.0, B)) == pytest.approx(8.0)


def test_run_is_as_fast_as_ever_when_its_neighbour_has_ended() -> None:
    """a needs 8 s beside b; b has 8 s at half its speed, which leaves 4 s of it."""
    slowdowns = {(A, B): 2.0, (B, A): 2.0}
    assert pair(slowdowns, (0.0, A), (0.0, B)) == pytest.approx(12.0)


def test_run_slows_down_from_when_another_begins() -> None:
    """b has 6 s left at 2 s; at half its speed until a has ended, 6 s later."""
    slowdowns = {(A, B): 1.5, (B, A): 2.0}
    assert pair(slowdowns, (0.0, B), (2.0, A)) == pytest.approx(11.0)


def test_runs_of_one_model_take_turns() -> None:
    assert pair({}, (0.0, A), (0.0, A)) == pytest.approx(8.0)


@pytest.mark.parametrize("policy", policies.available())
def test_all_jobs_of_the_paper_are_done_under_every_policy(policy: str) -> None:
    assert makespan_s(policy, 1, slowdowns=table()) > 0.0


def test_pairs_are_done_sooner_than_other_orders_when_some_disturb_each_other_much() -> None:
    """Whose slowdowns lie further apart than those of the paper, where little is to be gained."""
    far = {key: 1.0 + 3.0 * max(0.0, value - 1.0) for key, value in table().items()}
    totals = {
        policy: sum(makespan_s(policy, seed, slowdowns=far) for seed in range(4))
        for policy in ("pairs", "lb", "lalbo3", "netgain")
    }
    assert totals["pairs"] < min(totals[each] for each in ("lb", "lalbo3", "netgain"))
