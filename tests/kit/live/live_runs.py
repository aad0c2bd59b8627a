"""The live runs: each starts a system, puts a load on it, and returns its figures."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from cache_manager.model.ids import MIB, ModelId
from scheduler import policies
from scheduler.composition import make_core
from scheduler.model.values import GpuSpec
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware, SimModel
from scheduler.sim.workload import Workload
from tests.kit.live.emulated_node import given_twice
from tests.kit.live.live_load import (
    RequestFigures,
    arrive,
    one_after_the_other,
    poisson,
    request_figures,
    thesis,
    zipf,
    zipf_gpus,
    zipf_models,
)
from tests.kit.live.live_system import LiveSystem, Setup, ideal, live

ZIPF_WARMING, ZIPF_MEASURED, ZIPF_CALLERS = 150, 500, 8
OVERLAP_BEFORE_S, OVERLAP_RUN_S = 0.04, 0.01
POLICY = "lalbo3"

Make = Callable[[Setup], AbstractAsyncContextManager[LiveSystem]]
LoopMaker = Callable[[], asyncio.AbstractEventLoop]


class WrongOrders(Exception):
    """The scheduler gave a node an order that no GPU could carry out."""


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
    """One policy on this many GPUs under this load."""
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


def closed_loop(make: Make, seed: int, new_loop: LoopMaker, policy: str = POLICY) -> RequestFigures:
    """Zipf 1.0 on cold caches: eight callers, each with one request at a time."""
    models = zipf_models()
    wanted = zipf(models, ZIPF_WARMING + ZIPF_MEASURED, seed)

    def load(system: LiveSystem) -> Awaitable[None]:
        return one_after_the_other(system, wanted, ZIPF_CALLERS)

    return _run(make, Setup(policy, zipf_gpus(), models), load, new_loop, ZIPF_WARMING)


def open_loop(
    make: Make, rate: float, seed: int, new_loop: LoopMaker, policy: str = POLICY
) -> RequestFigures:
    """Zipf 1.0 on cold caches: random arrivals at a rate that does not depend on answers."""
    models = zipf_models()
    arrivals = poisson(zipf(models, ZIPF_WARMING + ZIPF_MEASURED, seed), rate, seed)

    def load(system: LiveSystem) -> Awaitable[None]:
        return arrive(system, arrivals)

    return _run(make, Setup(policy, zipf_gpus(), models), load, new_loop, ZIPF_WARMING)


def overlapping(make: Make, leases: int, requests: int, new_loop: LoopMaker) -> RequestFigures:
    """A function that works without the GPU before its GPU work, on one GPU with several leases."""
    model = SimModel(ModelId("m"), "one", 1024 * MIB, OVERLAP_RUN_S, OVERLAP_RUN_S)
    setup = Setup(POLICY, zipf_gpus(1, leases), [model])

    def load(system: LiveSystem) -> Awaitable[None]:
        wanted = [model.id] * requests
        return one_after_the_other(system, wanted, 2 * leases, OVERLAP_BEFORE_S)

    return _run(make, setup, load, new_loop, skipped=2 * leases)


def recorded(path: Path, new_loop: LoopMaker, requests: int = 72, seed: int = 1) -> None:
    """A short live run on two nodes, under every policy in turn, written to this file."""
    load = thesis(gpus=8, minutes=1, within_s=3.0, seed=seed)
    arrivals = load.arrivals[:requests]
    hardware = Hardware(gpus=8)

    async def swap_policies(system: LiveSystem) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(arrive(system, arrivals))
            for policy in policies.available():
                await system.driver.set_policy(policy)
                await asyncio.sleep(arrivals[-1][0] / len(policies.available()))

    path.unlink(missing_ok=True)
    _run(live, Setup(POLICY, hardware.specs(), load.models, path), swap_policies, new_loop)


def check(system: LiveSystem, gpus: Sequence[GpuSpec]) -> None:
    """Raise WrongOrders where a slot was given twice or a node got an order that makes no sense."""
    leases = {slot.leases for gpu in gpus for slot in gpu.slot_specs()}
    for node in system.nodes.values():
        if node.wrong or given_twice(node.log, max(leases)):
            raise WrongOrders(f"{node.name}: {node.wrong} {given_twice(node.log, max(leases))}")


def _run(
    make: Make,
    setup: Setup,
    load: Callable[[LiveSystem], Awaitable[None]],
    new_loop: LoopMaker,
    skipped: int = 0,
) -> RequestFigures:
    """The figures of all requests but the first to arrive."""

    async def run() -> RequestFigures:
        async with make(setup) as system:
            await load(system)
            check(system, setup.gpus)
            answered = sorted(system.answered, key=lambda each: each.arrived_s)
            return request_figures(answered[skipped:])

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(run())


IDEAL: Make = ideal
LIVE: Make = live
