"""What callers ask for: arrivals at given times, or so many callers one request after the other."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from statistics import fmean

from bench.live_system import Answered, System
from cache_manager.model import MIB, GpuId, ModelId, NodeId
from scheduler.model import GpuSpec, SlotId, SlotSpec
from scheduler.sim import workload
from scheduler.sim.catalogue import SimModel
from scheduler.sim.tally import percentile
from scheduler.sim.workload import Pattern, Workload

ZIPF_MODELS = 16
ZIPF_GPUS = 4
ZIPF_ROOM = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """What some requests come to."""

    requests: int
    rate: float
    hit_ratio: float
    average_s: float
    p50_s: float
    p99_s: float


def figures(answered: Sequence[Answered]) -> Figures:
    """Of these requests, from the first arrival to the last answer."""
    ordered = sorted(each.latency_s for each in answered)
    began_s = min(each.arrived_s for each in answered)
    took_s = max(each.done_s for each in answered) - began_s
    leases = {each.lease: each.hit for each in answered}
    return Figures(
        requests=len(ordered),
        rate=len(ordered) / took_s,
        hit_ratio=sum(leases.values()) / len(leases),
        average_s=fmean(ordered),
        p50_s=percentile(ordered, 0.50),
        p99_s=percentile(ordered, 0.99),
    )


# -- the thesis's workload, faster ----------------------------------------------------------------


def faster(found: Workload, times: float) -> Workload:
    """The same workload with arrivals, loads and runs so many times as fast."""
    models = tuple(
        replace(model, load_s=model.load_s / times, run_s=model.run_s / times)
        for model in found.models
    )
    return Workload(models, tuple((at_s / times, model) for at_s, model in found.arrivals))


def thesis(gpus: int, minutes: int, within_s: float, seed: int, working_set: int = 15) -> Workload:
    """Minutes of section 5.1's load for so many of its twelve GPUs, within these seconds."""
    rate = round(325 * gpus / 12)
    found = workload.thesis(working_set, rate, minutes, Pattern(), seed)
    return faster(found, minutes * workload.MINUTE_S / within_s)


async def arrive(system: System, arrivals: Sequence[tuple[float, ModelId]]) -> None:
    """Each request at its time, from now on; until the last is answered and every slot free."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as callers:
        for number, (at_s, model) in enumerate(arrivals):
            await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
            callers.create_task(system.ask(f"r{number}", model))
    await system.at_rest()


# -- Zipf -----------------------------------------------------------------------------------------


def zipf_models(load_s: float = 0.25, run_s: float = 0.02) -> list[SimModel]:
    """Models of one size and the same times, from the most to the least used."""
    return [
        SimModel(ModelId(f"m{number:02d}"), "one", 1024 * MIB, load_s, run_s)
        for number in range(ZIPF_MODELS)
    ]


def zipf_gpus(gpus: int = ZIPF_GPUS, leases: int = 1) -> list[GpuSpec]:
    """One node's GPUs with room for four of these models, and slots for so many leases."""
    return [
        GpuSpec(
            GpuId(f"gpu{number}"),
            NodeId("node0"),
            ZIPF_ROOM * 1024 * MIB,
            slots=(SlotSpec(SlotId(f"gpu{number}"), leases),),
        )
        for number in range(gpus)
    ]


def zipf(models: Sequence[SimModel], number: int, seed: int) -> list[ModelId]:
    """Whose model each request wants, with exponent 1."""
    shares = list(accumulate(1.0 / rank for rank in range(1, len(models) + 1)))
    chosen = Random(seed).choices(models, cum_weights=shares, k=number)
    return [model.id for model in chosen]


def poisson(wanted: Sequence[ModelId], rate: float, seed: int) -> list[tuple[float, ModelId]]:
    """Arrivals at random, so many a second on average."""
    random = Random(f"arrivals {seed}")  # else gaps would go with models
    times = accumulate(random.expovariate(rate) for _ in wanted)
    return list(zip(times, wanted, strict=True))


async def one_after_the_other(
    system: System, wanted: Sequence[ModelId], callers: int, before_s: float = 0.0
) -> None:
    """So many callers share these requests, each of whom asks again once it is answered."""
    left = iter(enumerate(wanted))

    async def caller() -> None:
        for number, model in left:
            await system.ask(f"r{number}", model, before_s)

    await asyncio.gather(*(caller() for _ in range(callers)))
    await system.at_rest()
