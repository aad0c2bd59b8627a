"""The live runs themselves: each sets a system up, loads it, and says what came of it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.live_load import (
    Figures,
    arrive,
    figures,
    one_after_the_other,
    poisson,
    thesis,
    zipf,
    zipf_gpus,
    zipf_models,
)
from bench.live_node import given_twice
from bench.live_system import Setup, System, ideal, live
from cache_manager.model import MIB, ModelId
from scheduler import policies
from scheduler.core import make_core
from scheduler.model import GpuSpec
from scheduler.sim.catalogue import SimModel
from scheduler.sim.engine import Engine, Hardware
from scheduler.sim.workload import Workload

ZIPF_WARMING, ZIPF_MEASURED, ZIPF_CALLERS = 150, 500, 8
OVERLAP_BEFORE_S, OVERLAP_RUN_S = 0.04, 0.01
POLICY = "lalbo3"

Make = Callable[[Setup], AbstractAsyncContextManager[System]]
LoopMaker = Callable[[], asyncio.AbstractEventLoop]


class WrongOrders(Exception):
    """The scheduler asked of a node what no GPU could do."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The same arrivals in the simulator and live."""

    policy: str
    gpus: int
    requests: int
    simulated_hit_ratio: float
    live_hit_ratio: float
    simulated_s: float
    live_s: float

    @property
    def hit_points(self) -> float:
        """How much more often the live system hits, in points."""
        return 100.0 * (self.live_hit_ratio - self.simulated_hit_ratio)

    @property
    def latency_percent(self) -> float:
        """How much longer the live system's average latency is."""
        return 100.0 * (self.live_s / self.simulated_s - 1.0)


def averaged(runs: Sequence[Compared]) -> Compared:
    """Of one policy on as many GPUs, over several loads."""
    first, count = runs[0], len(runs)
    return Compared(
        policy=first.policy,
        gpus=first.gpus,
        requests=sum(each.requests for each in runs) // count,
        simulated_hit_ratio=fmean(each.simulated_hit_ratio for each in runs),
        live_hit_ratio=fmean(each.live_hit_ratio for each in runs),
        simulated_s=fmean(each.simulated_s for each in runs),
        live_s=fmean(each.live_s for each in runs),
    )


def compared(policy: str, gpus: int, load: Workload, new_loop: LoopMaker) -> Compared:
    """One policy on so many GPUs under this load."""
    hardware = Hardware(gpus)
    simulated = Engine(make_core(policy), hardware, load).run().tally.summary()
    setup = Setup(policy, hardware.specs(), load.models)
    found = _run(live, setup, lambda system: arrive(system, load.arrivals), new_loop)
    return Compared(
        policy=policy,
        gpus=gpus,
        requests=found.requests,
        simulated_hit_ratio=1.0 - simulated.miss_ratio,
        live_hit_ratio=found.hit_ratio,
        simulated_s=simulated.avg_latency_s,
        live_s=found.average_s,
    )


def closed_loop(make: Make, seed: int, new_loop: LoopMaker, policy: str = POLICY) -> Figures:
    """Zipf 1.0 on cold caches: eight callers, each of whom asks again once it is answered."""
    models = zipf_models()
    wanted = zipf(models, ZIPF_WARMING + ZIPF_MEASURED, seed)

    def load(system: System) -> Awaitable[None]:
        return one_after_the_other(system, wanted, ZIPF_CALLERS)

    return _run(make, Setup(policy, zipf_gpus(), models), load, new_loop, ZIPF_WARMING)


def open_loop(
    make: Make, rate: float, seed: int, new_loop: LoopMaker, policy: str = POLICY
) -> Figures:
    """Zipf 1.0 on cold caches: so many requests a second at random, whatever the answers do."""
    models = zipf_models()
    arrivals = poisson(zipf(models, ZIPF_WARMING + ZIPF_MEASURED, seed), rate, seed)

    def load(system: System) -> Awaitable[None]:
        return arrive(system, arrivals)

    return _run(make, Setup(policy, zipf_gpus(), models), load, new_loop, ZIPF_WARMING)


def overlapping(make: Make, leases: int, requests: int, new_loop: LoopMaker) -> Figures:
    """A function with work of its own before its GPU work, on one GPU with so many leases."""
    model = SimModel(ModelId("m"), "one", 1024 * MIB, OVERLAP_RUN_S, OVERLAP_RUN_S)
    setup = Setup(POLICY, zipf_gpus(1, leases), [model])

    def load(system: System) -> Awaitable[None]:
        wanted = [model.id] * requests
        return one_after_the_other(system, wanted, 2 * leases, OVERLAP_BEFORE_S)

    return _run(make, setup, load, new_loop, skipped=2 * leases)


def recorded(path: Path, new_loop: LoopMaker, requests: int = 72, seed: int = 1) -> None:
    """A short live run on two nodes, under every policy in turn, written to this file."""
    load = thesis(gpus=8, minutes=1, within_s=3.0, seed=seed)
    arrivals = load.arrivals[:requests]
    hardware = Hardware(gpus=8)

    async def swap_policies(system: System) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(arrive(system, arrivals))
            for policy in policies.available():
                await system.driver.set_policy(policy)
                await asyncio.sleep(arrivals[-1][0] / len(policies.available()))

    path.unlink(missing_ok=True)
    _run(live, Setup(POLICY, hardware.specs(), load.models, path), swap_policies, new_loop)


def check(system: System, gpus: Sequence[GpuSpec]) -> None:
    """Raise where a slot was given twice, or a node was told what makes no sense."""
    leases = {slot.leases for gpu in gpus for slot in gpu.slot_specs()}
    for node in system.nodes.values():
        if node.wrong or given_twice(node.log, max(leases)):
            raise WrongOrders(f"{node.name}: {node.wrong} {given_twice(node.log, max(leases))}")


def _run(
    make: Make,
    setup: Setup,
    load: Callable[[System], Awaitable[None]],
    new_loop: LoopMaker,
    skipped: int = 0,
) -> Figures:
    """The figures of all requests but the first to arrive."""

    async def run() -> Figures:
        async with make(setup) as system:
            await load(system)
            check(system, setup.gpus)
            answered = sorted(system.answered, key=lambda each: each.arrived_s)
            return figures(answered[skipped:])

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(run())


IDEAL: Make = ideal
LIVE: Make = live
