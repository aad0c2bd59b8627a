"""Loads of live systems: arrivals at given times, or callers with one request at a time each."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from statistics import fmean

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId
from scheduler.model.values import GpuSpec, SlotId, SlotSpec
from scheduler.sim import workload
from scheduler.sim.model_catalogue import SimModel
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.workload import Pattern, Workload
from tests.kit.live.live_system import AnsweredRequest, LiveSystem

ZIPF_MODELS = 16
ZIPF_GPUS = 4
ZIPF_ROOM = 4


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """The figures of some requests."""

    requests: int
    rate: float
    hit_ratio: float
    average_s: float
    p50_s: float
    p99_s: float


def request_figures(answered: Sequence[AnsweredRequest]) -> RequestFigures:
    """The figures of these requests, from the first arrival to the last answer."""
    ordered = sorted(each.latency_s for each in answered)
    began_s = min(each.arrived_s for each in answered)
    took_s = max(each.done_s for each in answered) - began_s
    leases = {each.lease: each.hit for each in answered}
    return RequestFigures(
        requests=len(ordered),
        rate=len(ordered) / took_s,
        hit_ratio=sum(leases.values()) / len(leases),
        average_s=fmean(ordered),
        p50_s=percentile(ordered, 0.50),
        p99_s=percentile(ordered, 0.99),
    )


# -- the thesis's workload, faster ----------------------------------------------------------------


def faster(found: Workload, times: float) -> Workload:
    """The same workload with arrivals, loads and runs faster by this factor."""
    models = tuple(
        replace(model, load_s=model.load_s / times, run_s=model.run_s / times)
        for model in found.models
    )
    return Workload(models, tuple((at_s / times, model) for at_s, model in found.arrivals))


def thesis(gpus: int, minutes: int, within_s: float, seed: int, working_set: int = 15) -> Workload:
    """Minutes of section 5.1's load for this many of its twelve GPUs, within these seconds."""
    rate = round(325 * gpus / 12)
    found = workload.thesis(working_set, rate, minutes, Pattern(), seed)
    return faster(found, minutes * workload.MINUTE_S / within_s)


async def arrive(system: LiveSystem, arrivals: Sequence[tuple[float, ModelId]]) -> None:
    """Make each request at its time; wait until all are answered and every slot is free."""
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
    """One node's GPUs with room for four of these models, and slots for this many leases."""
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
    """The model of each request, by Zipf's law with exponent 1."""
    shares = list(accumulate(1.0 / rank for rank in range(1, len(models) + 1)))
    chosen = Random(seed).choices(models, cum_weights=shares, k=number)
    return [model.id for model in chosen]


def poisson(wanted: Sequence[ModelId], rate: float, seed: int) -> list[tuple[float, ModelId]]:
    """Random arrivals at this average rate a second."""
    random = Random(f"arrivals {seed}")  # so that gaps do not depend on models
    times = accumulate(random.expovariate(rate) for _ in wanted)
    return list(zip(times, wanted, strict=True))


async def one_after_the_other(
    system: LiveSystem, wanted: Sequence[ModelId], callers: int, before_s: float = 0.0
) -> None:
    """Callers that share these requests; each makes the next request once it is answered."""
    left = iter(enumerate(wanted))

    async def caller() -> None:
        for number, model in left:
            await system.ask(f"r{number}", model, before_s)

    await asyncio.gather(*(caller() for _ in range(callers)))
    await system.at_rest()
