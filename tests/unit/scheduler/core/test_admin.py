"""Orders and memory pressure: pin, unpin, prefetch, evict, pressure, growth."""

import pytest

from cache_manager.model.ids import MIB, GpuId, ModelId, Tier
from scheduler.model.actions import Demote, Dispatch, Finish, Prepare
from scheduler.model.events import (
    EvictAsked,
    GpuSnapshot,
    MemoryPressure,
    ModelLoaded,
    ModelRegistered,
    NodeSnapshot,
    PinAsked,
    PrefetchAsked,
    RunFinished,
    UnpinAsked,
)
from scheduler.model.values import RequestOutcome, SlotId
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, ended, only, placements, refused

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
G0 = gpu("g0", memory_mb=4096)
SPECS = (model("a", memory_mb=2048), model("b", memory_mb=2048), model("c", memory_mb=2048))


def world_holding(*names: str, policy: str = "lb") -> World:
    """One GPU with room for two of the three models; it holds these."""
    world = World(a_core(policy, gpus=(G0,), models=SPECS))
    if names:
        world.send(holding(G0, *(spec for spec in SPECS if spec.id in names)))
    return world


# -- pin and unpin --------------------------------------------------------------------------------


def test_pinned_model_is_spared_when_it_is_the_least_recently_used() -> None:
    world = world_holding("a", "b")
    assert world.send(PinAsked(A, G0.id)) == []
    assert only(Prepare, world.arrive(request("r0", "c"))).victims == ("b",)


def test_unpinned_model_is_a_victim_again_when_room_is_needed() -> None:
    world = world_holding("a", "b")
    world.send(PinAsked(A, G0.id))
    world.send(UnpinAsked(A, G0.id))
    assert only(Prepare, world.arrive(request("r0", "c"))).victims == ("a",)


def test_pinned_model_is_loaded_when_it_is_not_there() -> None:
    world = world_holding()
    prepare = only(Prepare, world.send(PinAsked(A, G0.id)))
    assert prepare.prefetch
    assert [load.model for load in prepare.loads] == ["a"]


def test_model_is_pinned_wherever_it_is_when_no_gpu_is_named() -> None:
    world = World(a_core("lb", gpus=(), models=SPECS))
    for name in ("g0", "g1"):
        world.send(holding(gpu(name, memory_mb=4096), SPECS[0], SPECS[1]))
    world.send(PinAsked(A))
    actions = world.arrive(request("r0", "c"), request("r1", "c"))
    assert [each.victims for each in actions if isinstance(each, Prepare)] == [("b",), ("b",)]
    world.send(UnpinAsked(A))


def test_request_waits_when_only_pinned_models_stand_in_its_way() -> None:
    world = world_holding("a", "b")
    world.send(PinAsked(A))
    world.send(PinAsked(B))
    assert world.arrive(request("r0", "c")) == []
    assert placements(world.send(UnpinAsked(B))) == [("r0", "g0")]


@pytest.mark.parametrize("policy", ["rr", "rro3"])
def test_local_queue_is_given_back_when_a_pin_takes_its_room(policy: str) -> None:
    large = gpu("g1", memory_mb=4096)
    world = World(a_core(policy, gpus=(G0,), models=(*SPECS, model("d", memory_mb=4096))))
    world.send(holding(G0, SPECS[0]))
    world.arrive(request("running", "a"), request("r0", "d"))
    world.send(PinAsked(A, G0.id))
    actions = world.send(holding(large))
    assert placements(actions) == [("r0", "queue of g1"), ("r0", "g1")]


@pytest.mark.parametrize("policy", ["rr", "rro3"])
def test_requests_behind_are_placed_when_the_first_fits_nowhere_for_a_pin(policy: str) -> None:
    world = World(a_core(policy, gpus=(G0,), models=(*SPECS, model("d", memory_mb=4096))))
    world.send(holding(G0, SPECS[0]))
    world.send(PinAsked(A))
    assert world.arrive(request("r0", "d")) == []
    assert placements(world.arrive(request("r1", "a"))) == [("r1", "queue of g0"), ("r1", "g0")]


# -- prefetch -------------------------------------------------------------------------------------


def test_prefetched_model_is_a_hit_when_it_is_asked_for() -> None:
    world = world_holding()
    only(Prepare, world.send(PrefetchAsked(A)))
    world.free("g0")
    assert only(Dispatch, world.arrive(request("r0", "a"))).hit


def test_slot_is_busy_when_it_prefetches() -> None:
    world = world_holding()
    world.send(PrefetchAsked(A))
    assert world.arrive(request("r0", "b")) == []
    assert placements(world.free("g0")) == [("r0", "g0")]


def test_prefetch_takes_the_least_used_gpu_with_room_when_none_is_named() -> None:
    world = World(a_core("lb", gpus=("g0", "g1"), models=SPECS))
    world.arrive(request("r0", "a"))
    world.free("g0")
    assert only(Prepare, world.send(PrefetchAsked(B))).gpu == "g1"


# -- evict ----------------------------------------------------------------------------------------


def test_model_leaves_when_it_is_evicted() -> None:
    world = world_holding("a")
    demote = only(Demote, world.send(EvictAsked(A, G0.id)))
    assert (demote.gpu, demote.model) == ("g0", "a")
    assert not only(Dispatch, world.arrive(request("r0", "a"))).hit


def test_model_leaves_every_gpu_when_none_is_named() -> None:
    world = World(a_core("lb", gpus=(), models=SPECS))
    for name in ("g0", "g1"):
        world.send(holding(gpu(name), SPECS[0]))
    demoted = [each.gpu for each in world.send(EvictAsked(A)) if isinstance(each, Demote)]
    assert demoted == ["g0", "g1"]


def test_model_leaves_only_idle_gpus_when_it_is_in_use_on_another() -> None:
    world = World(a_core("lb", gpus=(), models=SPECS))
    for name in ("g0", "g1"):
        world.send(holding(gpu(name), SPECS[0]))
    world.arrive(request("r0", "a"))
    actions = world.send(EvictAsked(A))
    assert only(Demote, actions).gpu == "g1"
    assert "g0" in refused(actions)[0]


# -- refusals -------------------------------------------------------------------------------------


def test_request_of_a_person_is_refused_when_it_cannot_be_done() -> None:
    world = world_holding("a")
    nowhere = GpuId("nowhere")
    for event in (
        PinAsked(A, nowhere),
        UnpinAsked(A, nowhere),
        PrefetchAsked(A, nowhere),
        EvictAsked(A, nowhere),
        PinAsked(B),
        UnpinAsked(B),
        EvictAsked(B),
        PrefetchAsked(A, G0.id),
    ):
        (reason,) = refused(world.send(event))
        assert reason
    world.arrive(request("r0", "a"))
    for busy in (EvictAsked(A), PrefetchAsked(B), PrefetchAsked(B, G0.id), PinAsked(B, G0.id)):
        (reason,) = refused(world.send(busy))
        assert reason


def test_eviction_is_refused_when_a_local_queue_waits_for_the_model() -> None:
    world = world_holding("a", "b", policy="rr")
    world.arrive(request("r0", "a"), request("r1", "b"))
    assert "g0" in refused(world.send(EvictAsked(B)))[0]


def test_prefetch_is_refused_when_pins_leave_no_room() -> None:
    world = world_holding("a", "b")
    world.send(PinAsked(A))
    world.send(PinAsked(B))
    for event in (PrefetchAsked(C), PrefetchAsked(C, G0.id)):
        assert refused(world.send(event)) != []


# -- memory pressure and growth -------------------------------------------------------------------


def test_least_recently_used_leaves_when_memory_runs_short() -> None:
    world = world_holding("a", "b")
    assert only(Demote, world.send(MemoryPressure(G0.id, 100 * MIB))).model == "a"


def test_all_that_is_idle_leaves_when_more_memory_is_short_than_there_is() -> None:
    world = world_holding("a", "b")
    world.arrive(request("r0", "b"))
    assert only(Demote, world.send(MemoryPressure(G0.id, 9999 * MIB))).model == "a"


def test_room_is_not_given_away_again_when_memory_ran_short() -> None:
    world = world_holding("a", "b")
    cache = world.core.cluster.gpus[G0.id].cache
    world.send(MemoryPressure(G0.id, cache.free_bytes + 100 * MIB))
    assert cache.free_bytes + cache.withheld_bytes == cache.memory_bytes - cache.residents[B].bytes
    assert refused(world.send(PrefetchAsked(C, G0.id))) == []
    assert B not in cache.residents  # it had to leave: what was short is still short


def test_nothing_leaves_when_others_take_what_was_free() -> None:
    world = world_holding("a", "b")
    cache = world.core.cluster.gpus[G0.id].cache
    free_bytes = cache.free_bytes
    assert world.send(MemoryPressure(G0.id, 0, withheld_bytes=free_bytes)) == []
    assert (cache.free_bytes, cache.withheld_bytes) == (0, free_bytes)


def test_models_leave_for_what_others_take_beyond_what_was_free() -> None:
    world = world_holding("a", "b")
    cache = world.core.cluster.gpus[G0.id].cache
    left_bytes = cache.residents[B].bytes
    taken_bytes = cache.free_bytes + 1
    pressure = MemoryPressure(G0.id, 0, withheld_bytes=taken_bytes)
    assert only(Demote, world.send(pressure)).model == "a"
    assert cache.free_bytes == cache.memory_bytes - left_bytes - taken_bytes


def test_room_is_there_again_when_the_node_reports_again() -> None:
    world = world_holding("a", "b")
    cache = world.core.cluster.gpus[G0.id].cache
    world.send(MemoryPressure(G0.id, 100 * MIB))
    world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0, ((B, cache.residents[B].bytes),)),)))
    assert cache.withheld_bytes == 0


def test_pressure_is_refused_when_the_gpu_is_unknown() -> None:
    assert refused(world_holding().send(MemoryPressure(GpuId("nowhere"), 1))) != []


@pytest.mark.parametrize("loaded", [True, False], ids=["load", "run"])
def test_idle_models_leave_when_a_model_takes_more_than_was_thought(loaded: bool) -> None:  # noqa: FBT001 (a case)
    world = world_holding("a")
    world.arrive(request("r0", "b"))
    grown = 3000 * MIB
    actions = world.send(
        ModelLoaded(G0.id, B, 2.0, Tier.ABSENT, grown)
        if loaded
        else RunFinished(SlotId("g0"), B, 1, 1.0, grown)
    )
    assert only(Demote, actions).model == "a"


def test_next_load_reserves_the_measured_size_when_it_was_less_than_declared() -> None:
    world = world_holding()
    world.arrive(request("r0", "a"))
    world.send(ModelLoaded(G0.id, A, 2.0, Tier.ABSENT, 500 * MIB))
    world.free("g0")
    world.send(EvictAsked(A))
    (load,) = only(Prepare, world.arrive(request("r1", "a"))).loads
    assert load.memory_bytes == 500 * MIB


def test_measured_peak_never_shrinks_when_a_later_run_needs_less() -> None:
    world = world_holding()
    world.arrive(request("r0", "a"))
    for peak in (900 * MIB, 700 * MIB):
        world.send(RunFinished(SlotId("g0"), A, 1, 1.0, peak))
    world.free("g0")
    world.send(EvictAsked(A))
    (load,) = only(Prepare, world.arrive(request("r1", "a"))).loads
    assert load.memory_bytes == 900 * MIB


def test_request_continues_when_an_old_copy_is_larger_than_the_model_is_now() -> None:
    models = (model("a", memory_mb=2600), model("b", memory_mb=3500))
    world = World(a_core("lb", gpus=(gpu("g0", memory_mb=6000),), models=models))
    world.send(holding(gpu("g0", memory_mb=6000), models[0]))
    world.send(ModelLoaded(G0.id, A, 1.0, Tier.ABSENT, 2600 * MIB))
    world.send(ModelRegistered(model("b", memory_mb=3000)))
    assert placements(world.arrive(request("r0", "a", "b"))) == [("r0", "g0")]


def test_waiting_request_is_refused_when_its_model_turns_out_too_large() -> None:
    world = world_holding()
    world.arrive(request("running", "b"), request("r0", "a"))
    actions = world.send(ModelRegistered(model("a", memory_mb=5000)))
    assert ended(actions) == {"r0": RequestOutcome.TOO_LARGE}
    assert only(Finish, actions).reason


def test_local_queue_is_refused_when_its_model_turns_out_too_large() -> None:
    world = world_holding(policy="rr")
    world.arrive(request("running", "b"), request("r0", "a"), request("r1", "b"))
    actions = world.send(ModelRegistered(model("a", memory_mb=5000)))
    assert ended(actions) == {"r0": RequestOutcome.TOO_LARGE}
    assert placements(world.free("g0")) == [("r1", "g0")]
