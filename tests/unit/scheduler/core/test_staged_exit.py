"""Staged exit: idle models step down by time, and a call stops them wherever they are."""

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from scheduler.features.staged_exit import StagedExit
from scheduler.model.actions import (
    Action,
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    Prepare,
    SetTimer,
)
from scheduler.model.events import (
    ContextKept,
    GpuLost,
    GpuSnapshot,
    ModelDemoted,
    NodeSnapshot,
    PinAsked,
    SlotFreed,
    StageDue,
    UnpinAsked,
)
from scheduler.model.values import CoreSettings, SlotId
from tests.kit.cores.action_digest import lived
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.cores.core_world import World, only

NODE, GPU = NodeId("node-of-g0"), GpuId("g0")
BERT, VGG, OTHER = ModelId("t/bert"), ModelId("t/vgg"), ModelId("u/other")
STAGES = "fixed:10,20,30,40"
CONTEXT_BYTES = 300 * MIB
ALWAYS_ASKED = ["accepted", "stored", "store_reported", "forgotten"]


def a_world(exit_rule: str = STAGES, *, memory_mb: int = 4000) -> World:
    """One GPU whose contexts take 300 MB, and three models of 1 GB of two tenants."""
    spec = gpu("g0", memory_mb=memory_mb, context_mb=300)
    models = [model(name, load_s={Tier.ABSENT: 2.0, Tier.HOST: 0.5}) for name in (BERT, VGG, OTHER)]
    settings = CoreSettings(exit_rule=exit_rule)
    return World(a_core(gpus=[spec], models=models, settings=settings))


def used(world: World, name: str, at: float, until: float, *, rule: str | None = None) -> None:
    """A request uses a model from now on; it is idle from then on."""
    world.arrive(replace(request(f"{name}@{at}", name), exit_rule=rule), at=at)
    world.free("g0", at=until)


def stored(world: World, name: ModelId, tier: Tier) -> list[Action]:
    """The node says where it has a model's weights."""
    return world.send(ModelDemoted(NODE, None, name, tier))


def pass_timers(world: World, until: float) -> list[Action]:
    """Send every timer that is due until then, at its time; all actions of these."""
    actions: list[Action] = []
    while due := [timer for timer in world.stages if timer[0] <= until]:
        at_s, event = min(due, key=lambda timer: timer[0])
        world.stages.remove((at_s, event))
        actions += world.send(event, at_s)
    world.now = until
    return [action for action in actions if not isinstance(action, SetTimer)]


def used_bytes(world: World) -> int:
    return world.core.cluster.index.gpus[GPU].used_bytes


def test_idle_model_leaves_its_gpu_after_the_first_stage_and_its_process_stays() -> None:
    world = a_world()
    used(world, BERT, 0.0, 5.0)
    assert pass_timers(world, 14.9) == []
    (demote,) = pass_timers(world, 15.0)
    assert demote == Demote(GPU, BERT, "it was idle", keeps_context=True)
    assert used_bytes(world) == CONTEXT_BYTES


def test_model_goes_through_all_stages_down_to_nothing() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    stored(world, BERT, Tier.HOST)
    assert pass_timers(world, 30.0) == [EndContext(GPU, BERT, "it was idle")]
    assert used_bytes(world) == 0
    stored(world, BERT, Tier.HOST)
    assert pass_timers(world, 60.0) == [DemoteStored(NODE, BERT, Tier.DISK, "it was idle")]
    stored(world, BERT, Tier.DISK)
    assert pass_timers(world, 100.0) == [DemoteStored(NODE, BERT, Tier.ABSENT, "it was idle")]
    stored(world, BERT, Tier.ABSENT)
    assert pass_timers(world, 1_000.0) == []
    assert world.stages == []


def test_call_stops_the_exit_while_the_model_is_on_its_gpu() -> None:
    world = a_world()
    used(world, BERT, 0.0, 1.0)
    used(world, BERT, 9.0, 12.0)
    assert pass_timers(world, 21.9) == []
    assert [type(each) for each in pass_timers(world, 22.0)] == [Demote]


def test_model_in_use_does_not_leave() -> None:
    world = a_world()
    used(world, BERT, 0.0, 1.0)
    world.arrive(request("long", BERT), at=10.5)
    assert pass_timers(world, 100.0) == []
    world.free("g0", at=100.0)
    assert pass_timers(world, 109.9) == []
    assert [type(each) for each in pass_timers(world, 110.0)] == [Demote]


def test_model_comes_back_into_the_process_that_it_left() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    stored(world, BERT, Tier.HOST)
    actions = world.arrive(request("again", BERT), at=12.0)
    (load,) = only(Prepare, actions).loads
    assert (load.model, load.source, load.emptied) == (BERT, Tier.CONTEXT, BERT)
    assert used_bytes(world) == 1024 * MIB
    world.free("g0", at=13.0)
    assert pass_timers(world, 22.9) == []
    assert [type(each) for each in pass_timers(world, 23.0)] == [Demote]


@pytest.mark.parametrize("policy", ["lalb", "lalbo3", "netgain", "beside"])
def test_model_comes_back_to_the_gpu_that_keeps_its_process_though_others_are_idle(
    policy: str,
) -> None:
    gpus = [gpu(name, node=NODE, memory_mb=4000, context_mb=300) for name in ("g0", "g1")]
    bert = model(BERT, load_s={Tier.ABSENT: 2.0, Tier.HOST: 0.5, Tier.CONTEXT: 0.1})
    core = a_core(policy, gpus=gpus, models=[bert], settings=CoreSettings(exit_rule=STAGES))
    world = World(core)
    used(world, BERT, 0.0, 0.0)  # of the two it is the more used GPU from now on
    pass_timers(world, 10.0)
    stored(world, BERT, Tier.HOST)
    prepare = only(Prepare, world.arrive(request("again", BERT), at=12.0))
    assert (prepare.gpu, [load.emptied for load in prepare.loads]) == (GPU, [BERT])


def test_another_model_of_the_tenant_takes_an_empty_process() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    stored(world, BERT, Tier.HOST)
    (load,) = only(Prepare, world.arrive(request("other", VGG), at=12.0)).loads
    assert (load.emptied, load.source) == (BERT, Tier.ABSENT)
    # What it left there is gone: from now on its weights rest in host memory.
    assert pass_timers(world, 41.9) == []
    assert pass_timers(world, 42.0) == [DemoteStored(NODE, BERT, Tier.DISK, "it was idle")]


def test_no_model_of_another_tenant_takes_an_empty_process() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    prepare = only(Prepare, world.arrive(request("other", OTHER), at=12.0))
    assert [load.emptied for load in prepare.loads] == [None]
    assert used_bytes(world) == CONTEXT_BYTES + 1024 * MIB


def test_empty_processes_end_before_any_model_is_evicted() -> None:
    world = a_world(memory_mb=2200)
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    used(world, OTHER, 10.0, 11.0)
    prepare = only(Prepare, world.arrive(request("vgg", ModelId("v/vgg")), at=12.0))
    assert (prepare.emptied, prepare.victims) == ((BERT,), ())


def test_measured_process_is_counted_as_measured() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    world.send(ContextKept(GPU, BERT, 350 * MIB))
    assert used_bytes(world) == 350 * MIB


def test_process_that_has_no_room_ends() -> None:
    world = a_world(memory_mb=1400)
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    used(world, OTHER, 10.0, 10.5)
    actions = world.send(ContextKept(GPU, BERT, 500 * MIB))
    assert actions == [EndContext(GPU, BERT, "it has no room")]
    assert used_bytes(world) == 1024 * MIB


def test_lost_process_frees_what_was_counted() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    world.send(ModelDemoted(NODE, GPU, BERT, Tier.HOST))
    assert used_bytes(world) == 0
    (load,) = only(Prepare, world.arrive(request("again", BERT), at=12.0)).loads
    assert (load.source, load.emptied) == (Tier.HOST, None)


def test_pinned_model_stays_until_it_is_unpinned() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    world.send(PinAsked(BERT, GPU))
    assert pass_timers(world, 50.0) == []
    world.send(UnpinAsked(BERT, GPU))
    assert [type(each) for each in pass_timers(world, 52.0)] == [Demote]


@pytest.mark.parametrize(("own", "leaves_s"), [("fixed:3", 3.0), ("fixed:60", 60.0)])
def test_function_names_a_rule_of_its_own(own: str, leaves_s: float) -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0, rule=own)
    assert pass_timers(world, leaves_s - 0.1) == []
    assert [type(each) for each in pass_timers(world, leaves_s)] == [Demote]


def test_own_rule_holds_until_its_function_names_another() -> None:
    world = a_world("never")
    used(world, BERT, 0.0, 0.0, rule="fixed:5")
    used(world, BERT, 1.0, 1.0, rule=None)  # a shim that asks itself says nothing
    assert [type(each) for each in pass_timers(world, 6.0)] == [Demote]
    used(world, BERT, 7.0, 7.0, rule="")
    assert pass_timers(world, 100.0) == []


def test_little_is_asked_of_it_until_some_model_leaves_by_time() -> None:
    world = a_world("never")
    hooks = world.core.lifecycle.hooks
    used(world, BERT, 0.0, 1.0)
    layer = world.core.layer(StagedExit)
    assert [name for name, layers in hooks.items() if layer in layers] == ALWAYS_ASKED
    used(world, BERT, 2.0, 3.0, rule=STAGES)
    from_the_start = a_world().core.lifecycle.hooks
    for name, layers in hooks.items():  # it has its place before others that were on by then
        assert [type(each) for each in layers] == [type(each) for each in from_the_start[name]]


def test_stages_of_no_time_are_passed_through() -> None:
    world = a_world("fixed:0,0,30,30")
    used(world, BERT, 0.0, 1.0)
    (demote,) = pass_timers(world, 1.0)
    assert demote == Demote(GPU, BERT, "it was idle")
    assert used_bytes(world) == 0


def test_weights_stay_while_a_gpu_of_their_node_has_the_model() -> None:
    world = a_world("fixed:100,100,5,5")
    used(world, BERT, 0.0, 1.0)
    stored(world, BERT, Tier.HOST)
    assert pass_timers(world, 90.0) == []


def test_refused_step_is_tried_again_after_the_stage() -> None:
    world = a_world("fixed:0,0,10,10")
    used(world, BERT, 0.0, 1.0)
    pass_timers(world, 1.0)
    stored(world, BERT, Tier.HOST)
    assert [type(each) for each in pass_timers(world, 11.0)] == [DemoteStored]
    stored(world, BERT, Tier.HOST)  # something needs them
    assert pass_timers(world, 20.9) == []
    assert [type(each) for each in pass_timers(world, 21.0)] == [DemoteStored]


def test_lost_gpu_leaves_no_timer_behind_that_does_something() -> None:
    world = a_world()
    used(world, BERT, 0.0, 1.0)
    world.send(GpuLost(GPU))
    assert pass_timers(world, 1_000.0) == []


def test_new_leader_takes_empty_processes_over() -> None:
    world = a_world()
    spec = replace(gpu("g0", memory_mb=4000), context_bytes=320 * MIB)
    snapshot = GpuSnapshot(spec, contexts=((BERT, 310 * MIB),))
    world.send(NodeSnapshot(NODE, (snapshot,), ((BERT, Tier.HOST),)), at=5.0)
    assert used_bytes(world) == 310 * MIB
    assert pass_timers(world, 25.0) == [EndContext(GPU, BERT, "it was idle")]


def test_stages_go_on_when_the_node_reports_its_whole_state_again() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    used(world, VGG, 0.0, 0.0)
    stored(world, OTHER, Tier.HOST)
    pass_timers(world, 10.0)
    kept = tuple((left, CONTEXT_BYTES) for left in (BERT, VGG))
    spec = replace(gpu("g0", memory_mb=4000), context_bytes=CONTEXT_BYTES)
    for at in (20.0, 29.0):
        whole = GpuSnapshot(spec, contexts=kept)
        world.send(NodeSnapshot(NODE, (whole,), ((OTHER, Tier.HOST),)), at=at)
    assert pass_timers(world, 29.9) == []
    assert pass_timers(world, 30.0) == [
        DemoteStored(NODE, OTHER, Tier.DISK, "it was idle"),
        EndContext(GPU, BERT, "it was idle"),
        EndContext(GPU, VGG, "it was idle"),
    ]


def test_stage_begins_anew_when_the_node_reports_another_tier() -> None:
    world = a_world()
    stored(world, BERT, Tier.HOST)
    whole = GpuSnapshot(gpu("g0", memory_mb=4000))
    world.send(NodeSnapshot(NODE, (whole,), ((BERT, Tier.DISK),)), at=20.0)
    assert pass_timers(world, 59.9) == []
    assert pass_timers(world, 60.0) == [DemoteStored(NODE, BERT, Tier.ABSENT, "it was idle")]


def test_nothing_is_remembered_of_a_model_that_has_gone_through_all_stages() -> None:
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    for until, tier in ((10.0, Tier.HOST), (30.0, Tier.HOST), (60.0, Tier.DISK)):
        pass_timers(world, until)
        stored(world, BERT, tier)
    pass_timers(world, 1_000.0)
    stored(world, BERT, Tier.ABSENT)
    assert world.core.layer(StagedExit).remembered == 0


def test_timer_is_set_once_for_many_calls() -> None:
    world = a_world()
    for number in range(50):
        used(world, BERT, number / 10, number / 10 + 0.05)
    set_timers = [each for each in world.stages if each[1].gpu == GPU]
    assert len(set_timers) == 1


def test_stale_timer_changes_nothing() -> None:
    world = a_world()
    used(world, BERT, 0.0, 1.0)
    assert world.send(StageDue(NODE, GPU, BERT, 3.0), at=50.0) == []
    assert BERT in world.core.cluster.index.gpus[GPU].residents


def test_call_during_the_step_is_served_by_the_process_that_is_being_emptied() -> None:
    """The order to empty it is on its way; the order to load follows it to the same node."""
    world = a_world()
    used(world, BERT, 0.0, 0.0)
    pass_timers(world, 10.0)
    actions = world.arrive(request("at once", BERT), at=10.0)
    (load,) = only(Prepare, actions).loads
    assert load.emptied == BERT
    assert not only(Dispatch, actions).hit
    world.send(ContextKept(GPU, BERT, 350 * MIB))  # crossed the order to load
    assert used_bytes(world) == 1024 * MIB
    lease = world.lease_on("g0")
    world.send(SlotFreed(SlotId("g0"), lease))


def test_random_lives_have_models_that_leave() -> None:
    worlds = [lived("lalbo3", seed, count=4000) for seed in (1, 2, 3)]
    actions = [each for world in worlds for answer in world.answers for each in answer]
    for kind in (EndContext, DemoteStored):
        assert sum(isinstance(each, kind) for each in actions) > 5, kind
    demotes = [each for each in actions if isinstance(each, Demote)]
    assert sum(each.keeps_context for each in demotes) > 5
    loads = [load for each in actions if isinstance(each, Prepare) for load in each.loads]
    assert any(load.emptied == load.model for load in loads)
    assert any(load.emptied not in {load.model, None} for load in loads)
    events = [event for world in worlds for event, _ in world.log]
    snapshots = [event for event in events if isinstance(event, NodeSnapshot)]
    shared = [each for found in snapshots for gpu_ in found.gpus for each in gpu_.shared]
    assert sum(len(models) > 1 for _, models in shared) > 10
