"""When a busy GPU should be free: what LALB compares with a load, checked by placements.

A request for bert waits for the busy g0 if that is free sooner than bert loads (5 s) on g1.
"""

import pytest

from cache_manager.model.ids import ModelId, Tier
from scheduler.model.events import ModelLoaded, RequestCancelled
from scheduler.model.values import RequestId
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, placements

BERT, COLD = ModelId("bert"), ModelId("cold")
G0 = gpu("g0")
MODELS = (
    model("bert", load_s=5.0, run_s=3.0),
    model("cold", load_s=6.0, run_s=1.0),
    model("long", load_s=6.0, run_s=40.0),
)


def goes(world: World, name: str = "probe") -> str:
    """Where a request for bert goes now."""
    ((_, where),) = placements(world.arrive(request(name)))
    return where


def running_bert() -> World:
    """g0 runs bert from 0 to 3; g1 is idle and has nothing."""
    world = World(a_core("lalb", gpus=("g0", "g1"), models=MODELS))
    world.send(holding(G0, MODELS[0]))
    world.arrive(request("r0"))
    return world


def loading_cold() -> World:
    """g0 holds bert and loads cold (6 s) to run it (1 s): free at 7; g1 holds neither."""
    world = World(a_core("lalb", gpus=("g0",), models=MODELS))
    world.send(holding(G0, MODELS[0]))
    world.arrive(request("r0", "cold"))
    world.send(holding(gpu("g1", memory_mb=7000)))
    return world


def test_request_waits_when_the_busy_gpu_is_free_before_a_load_ends() -> None:
    assert goes(running_bert()) == "queue of g0"


def test_request_is_loaded_elsewhere_when_the_local_queue_is_too_long() -> None:
    world = running_bert()
    assert goes(world, "first") == "queue of g0"
    assert goes(world, "second") == "g1", "3 s to run and 3 s waiting are more than 5"


def test_request_is_loaded_elsewhere_when_the_wait_equals_the_load() -> None:
    """'Less than' (Algorithm 8, line 10)."""
    world = World(a_core("lalb", gpus=("g0", "g1"), models=(model("bert", load_s=3.0, run_s=3.0),)))
    world.send(holding(G0, MODELS[0]))
    world.arrive(request("r0"))
    assert goes(world) == "g1"


def test_wait_shrinks_as_time_passes() -> None:
    world = running_bert()
    goes(world, "first")
    world.now = 1.5
    assert goes(world, "second") == "queue of g0", "1.5 s to run and 3 s waiting are less than 5"


def test_wait_is_nothing_when_the_run_takes_longer_than_estimated() -> None:
    world = running_bert()
    world.now = 60.0
    assert goes(world, "first") == "queue of g0"
    assert goes(world, "second") == "queue of g0"


def test_wait_shrinks_when_a_request_leaves_the_local_queue() -> None:
    world = running_bert()
    goes(world, "first")
    world.send(RequestCancelled(RequestId("first")))
    assert goes(world, "second") == "queue of g0"


def test_wait_starts_again_when_the_slot_is_freed_early() -> None:
    world = World(a_core("lalb", gpus=("g0",), models=MODELS))
    world.send(holding(G0, *MODELS))
    world.arrive(request("r0", "long"), request("r1"))
    world.free("g0", at=1.0)
    world.send(holding(gpu("g1")))
    world.now = 1.0
    assert goes(world) == "queue of g0", "r1 runs until 4, not until 43"


@pytest.mark.parametrize(
    ("loaded_at_s", "where"),
    [(None, "g1"), (1.0, "queue of g0"), (6.0, "queue of g0")],
    ids=["still loading", "sooner", "as expected"],
)
def test_wait_follows_the_load_when_it_ends(loaded_at_s: float | None, where: str) -> None:
    world = loading_cold()
    if loaded_at_s is not None:
        world.send(ModelLoaded(G0.id, COLD, loaded_at_s, Tier.ABSENT), at=loaded_at_s)
    assert goes(world) == where


def test_wait_grows_when_a_load_takes_longer_than_estimated() -> None:
    """Expected at 2, done at 10: the run of 5.5 s has only just begun."""
    world = World(a_core("lalb", gpus=("g0",), models=(MODELS[0], model("cold", run_s=5.5))))
    world.send(holding(G0, MODELS[0]))
    world.arrive(request("r0", "cold"))
    world.send(holding(gpu("g1", memory_mb=7000)))
    world.send(ModelLoaded(G0.id, COLD, 10.0, Tier.ABSENT), at=10.0)
    assert goes(world) == "g1"


def test_soonest_holder_is_chosen_when_several_are_busy() -> None:
    specs = (gpu("g0"), gpu("g1"), gpu("g2"))
    world = World(a_core("lalb", gpus=("g0", "g1", "g2"), models=MODELS))
    for spec in specs[:2]:
        world.send(holding(spec, MODELS[0]))
    world.arrive(request("r0"), at=0.0)
    world.arrive(request("r1"), at=1.0)
    assert goes(world, "third") == "queue of g0"
    assert goes(world, "fourth") == "queue of g1", "g0 is free at 6 now, g1 at 4"


def test_correction_is_ignored_when_no_caller_waits_for_that_load() -> None:
    world = running_bert()
    world.send(ModelLoaded(G0.id, COLD, 99.0, Tier.ABSENT), at=1.0)
    assert goes(world) == "queue of g0"
