"""The policy of ours that loads models beside runs: when it waits, loads, or loads once more."""

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.composition import make_core
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.events import ModelLoaded, SlotFreed
from scheduler.model.values import SlotId
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.workload import Arrivals, Pattern, thesis
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, only, placements

HOT, COLD, OTHER = "hot", "cold", "other"
MODELS = tuple(model(name, memory_mb=4096, load_s=2.0, run_s=1.0) for name in (HOT, COLD, OTHER))


def two_gpus() -> World:
    """g0 holds hot and runs it; g1 holds cold and is idle, with room for one model more."""
    world = World(a_core("beside", gpus=(), models=MODELS))
    world.send(holding(gpu("g0", memory_mb=4096), MODELS[0]))
    world.send(holding(gpu("g1", memory_mb=8192), MODELS[1]))
    world.arrive(request("r0", HOT), at=100.0)
    return world


def test_request_waits_for_its_holder_when_that_is_free_before_a_load_would_end() -> None:
    world = two_gpus()
    assert placements(world.arrive(request("r1", HOT))) == []
    assert placements(world.free("g0", at=101.0)) == [("r1", "g0")]


def test_model_is_loaded_once_more_when_the_wait_for_its_holder_is_longer_than_a_load() -> None:
    world = two_gpus()
    found = world.arrive(*(request(f"r{number}", HOT) for number in range(1, 5)))
    dispatch = only(Dispatch, found)
    assert dispatch.rule == "one more copy saves more than it costs"
    assert dispatch.requests == ("r2",), "r1, the oldest one, will get the holder that comes free"
    assert only(Prepare, found).beside


def test_model_is_not_loaded_once_more_when_what_must_leave_is_asked_for_more_often() -> None:
    world = World(a_core("beside", gpus=(), models=MODELS))
    world.send(holding(gpu("g0", memory_mb=4096), MODELS[0]))
    world.send(holding(gpu("g1", memory_mb=4096), MODELS[1]))
    for number in range(60):  # cold runs again and again
        world.arrive(request(f"c{number}", COLD), at=float(number))
        world.free("g1", at=number + 0.9)
    world.arrive(request("r0", HOT), at=60.0)
    found = world.arrive(*(request(f"r{number}", HOT) for number in range(1, 5)))
    assert placements(found) == []


def test_load_goes_where_nothing_runs_when_others_run_for_longer_than_it_takes() -> None:
    long = model("long", memory_mb=1024, load_s=1.0, run_s=60.0)
    world = World(a_core("beside", gpus=("g0", "g1"), models=(*MODELS, long)))
    assert only(Dispatch, world.arrive(request("r0", "long"))).slot == "g0"
    world.send(ModelLoaded(GpuId("g0"), ModelId("long"), 1.0, Tier.ABSENT), 1.0)
    for number, name in enumerate((HOT, COLD), 1):  # the second time g0 was used less than g1
        assert only(Dispatch, world.arrive(request(f"r{number}", name))).slot == "g1"
        world.send(ModelLoaded(GpuId("g1"), ModelId(name), 2.0, Tier.ABSENT), world.now + 2.0)
        world.send(SlotFreed(SlotId("g1"), world.lease_of(f"r{number}")), world.now + 1.0)


def test_every_request_is_served_when_none_may_be_overtaken() -> None:
    workload = thesis(15, 160, 2, Pattern(Arrivals.POISSON), seed=3)
    core = make_core("beside", parameters={"patience": 0})
    engine = Engine(core, Hardware(gpus=6), workload)
    assert engine.run().tally.summary().requests == len(workload.arrivals)


def test_loads_overlap_runs_when_they_are_simulated() -> None:
    """The same core and hardware: a lease of a thesis policy holds both resources for a load."""
    workload = thesis(25, 160, 2, Pattern(Arrivals.POISSON), seed=3)
    figures = {}
    for policy in ("netgain", "beside"):
        run = Engine(make_core(policy), Hardware(gpus=6), workload).run()
        figures[policy] = run.tally.summary()
    assert figures["beside"].requests == figures["netgain"].requests
    assert figures["beside"].avg_latency_s < figures["netgain"].avg_latency_s
