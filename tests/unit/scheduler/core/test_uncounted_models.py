"""Memory on which reports and the core's own books disagree, checked by hits and victims."""

from collections.abc import Callable

import pytest

from cache_manager.model.ids import MIB, GpuId, ModelId, Tier
from scheduler.model.actions import Demote, Dispatch, Prepare
from scheduler.model.events import (
    EvictAsked,
    GpuSnapshot,
    LiveLease,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    ModelRegistered,
    NodeSnapshot,
    RunFinished,
)
from scheduler.model.values import LeaseId, RequestOutcome, SlotId
from tests.kit.cores.builders import GIB, a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, ended, only

BERT = ModelId("bert")
G0 = gpu("g0")


def loaded(name: str = "bert", load_s: float = 2.0) -> ModelLoaded:
    """The GPU g0 has loaded this model, of one GiB."""
    return ModelLoaded(G0.id, ModelId(name), load_s, Tier.ABSENT, GIB)


def demoted_while_loading(world: World) -> None:
    """bert's demotion is reported when it is being loaded again already."""
    world.send(holding(G0, "bert"))
    world.send(EvictAsked(BERT))
    world.arrive(request("r0"))
    world.send(ModelDemoted(G0.node, G0.id, BERT, Tier.HOST))


def attached_while_loading(world: World) -> None:
    """A manager reports its leases, but not the model that it is loading for one."""
    world.arrive(request("r0"))
    live = LiveLease(LeaseId(1), SlotId("g0"), (BERT,))
    world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0, (), (live,)),)))


@pytest.mark.parametrize("lose_count", [demoted_while_loading, attached_while_loading])
def test_model_counts_when_it_is_loaded_unexpectedly(lose_count: Callable[[World], None]) -> None:
    world = World(a_core("lb", models=("bert", model("big", memory_mb=8192))))
    lose_count(world)
    world.send(loaded(), at=2.0)
    world.free("g0", at=3.0)
    prepare = only(Prepare, world.arrive(request("r1", "big")))
    assert prepare.victims == ("bert",)


def test_model_does_not_count_when_it_had_to_leave_before_its_load_was_reported() -> None:
    world = World(a_core("lb", models=("bert", model("big", memory_mb=8192))))
    world.arrive(request("r0"))
    world.free("g0")
    assert only(Prepare, world.arrive(request("r1", "big"))).victims == ("bert",)
    assert world.send(loaded()) == []
    assert world.core.cluster.index.copies(BERT) == 0
    world.free("g0")
    assert only(Prepare, world.arrive(request("r2"))).victims == ("big",)
    world.send(loaded())
    world.free("g0")
    assert only(Dispatch, world.arrive(request("r3"))).hit


def test_model_counts_when_its_manager_reports_it_after_it_had_to_leave() -> None:
    world = World(a_core("lb", models=("bert", model("big", memory_mb=8192))))
    world.arrive(request("r0"))
    world.free("g0")
    world.arrive(request("r1", "big"))
    world.free("g0")
    world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0, ((BERT, GIB),)),)))
    world.send(EvictAsked(BERT))
    world.send(loaded())
    assert world.core.cluster.index.copies(BERT) == 1


def test_model_is_a_hit_when_it_was_loaded_unexpectedly() -> None:
    world = World(a_core("lb"))
    world.send(loaded())
    assert only(Dispatch, world.arrive(request("r0"))).hit


def test_idle_models_leave_when_a_model_is_there_unexpectedly() -> None:
    small = gpu("g0", memory_mb=2048)
    world = World(a_core("lb", gpus=(small,), models=("a", "b", "c")))
    world.send(holding(small, "a", "b"))
    assert only(Demote, world.send(loaded("c"))).model == "a"
    assert only(Dispatch, world.arrive(request("r0", "c"))).hit


def test_nothing_fails_when_a_load_of_a_lease_of_the_past_failed() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    failed = LoadFailed(G0.id, BERT, "no such file", lease=world.lease_on("g0"))
    world.send(failed)
    world.free("g0")
    world.arrive(request("r1"))
    assert world.send(failed) == []
    assert ended(world.free("g0")) == {"r1": RequestOutcome.COMPLETED}
    assert only(Dispatch, world.arrive(request("r2"))).hit


def test_model_is_loaded_again_when_its_load_failed_after_its_lease_had_ended() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    failed = LoadFailed(G0.id, BERT, "no such file", lease=world.lease_on("g0"))
    world.free("g0")
    assert world.send(failed) == []
    assert not only(Dispatch, world.arrive(request("r1"))).hit


def test_request_that_counted_on_a_load_fails_when_that_failed_after_its_own_lease() -> None:
    """The second request was a hit: the load of the first one was still under way."""
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    failed = LoadFailed(G0.id, BERT, "no such file", lease=world.lease_on("g0"))
    world.free("g0")
    assert only(Dispatch, world.arrive(request("r1"))).hit
    assert ended(world.send(failed)) == {"r1": RequestOutcome.FAILED}


def test_lease_fails_when_it_is_the_one_whose_load_failed() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    failed = LoadFailed(G0.id, BERT, "no such file", lease=world.lease_on("g0"))
    assert ended(world.send(failed)) == {"r0": RequestOutcome.FAILED}


@pytest.mark.parametrize(
    ("before_mb", "after_mb"),
    [
        ({"a": 1024, "b": 2048}, {"a": 3072, "b": 1024}),
        ({"a": 1024, "b": 2048}, {"b": 1024, "a": 3072}),
        ({"a": 3072, "b": 1024}, {"c": 2048, "a": 1024, "b": 1024}),
        ({"a": 3072, "b": 1024}, {"c": 3072, "b": 1024}),
        ({"a": 1024, "b": 1024, "c": 2048}, {"a": 2048, "b": 2048}),
    ],
    ids=["grows first", "shrinks first", "new before one that shrinks", "another", "two grow"],
)
def test_residents_are_those_of_the_report_when_sizes_have_changed(
    before_mb: dict[str, int], after_mb: dict[str, int]
) -> None:
    full = gpu("g0", memory_mb=4096)
    world = World(a_core("lb", gpus=(full,), models=("a", "b", "c")))
    for sizes in (before_mb, after_mb):
        models = [model(name, memory_mb=size) for name, size in sizes.items()]
        assert world.send(holding(full, *models)) == []
    cache = world.core.cluster.index.gpus[GpuId("g0")]
    found = {name: resident.bytes // 2**20 for name, resident in cache.residents.items()}
    assert found == after_mb
    assert cache.used_bytes == sum(after_mb.values()) * 2**20


# -- declared again -------------------------------------------------------------------------------


def test_declared_times_are_replaced_when_a_model_is_declared_again() -> None:
    world = World(a_core("lb", models=(model("bert", load_s=2.0, run_s=1.0),)))
    world.send(ModelRegistered(model("bert", load_s=9.0, run_s=5.0)))
    assert only(Dispatch, world.arrive(request("r0"))).estimate == (9.0, 5.0)


def test_usual_run_is_replaced_when_a_model_is_declared_again() -> None:
    """What netgain and the eviction rules go by."""
    world = World(a_core("netgain", models=(model("bert", run_s=1.0),)))
    world.send(ModelRegistered(model("bert", run_s=5.0)))
    assert world.core.cluster.profiles.usual_run_s(BERT) == 5.0


def test_measured_times_stay_when_a_model_is_declared_again() -> None:
    world = World(a_core("lb", models=(model("bert", load_s=2.0, run_s=1.0),)))
    world.send(loaded(load_s=2.0))
    world.send(RunFinished(SlotId("g0"), BERT, 1, 1.0))
    world.send(ModelRegistered(model("bert", load_s=9.0, run_s=5.0)))
    world.send(EvictAsked(BERT))
    assert only(Dispatch, world.arrive(request("r0"))).estimate == (2.0, 1.0)


def test_model_stays_counted_when_an_older_demotion_is_reported_while_it_loads() -> None:
    world = World(a_core("lb"))
    demoted_while_loading(world)
    assert world.core.cluster.index.copies(BERT) == 1


def shared_by(world: World, mib: int, *residents: str) -> list[str]:
    """A snapshot with processes that several models share; the models that leave for them."""
    held = tuple((ModelId(name), GIB) for name in residents)
    shared = ((mib * MIB, (ModelId(residents[0]),)),) if mib else ()
    snapshot = GpuSnapshot(G0, held, shared=shared)
    actions = world.send(NodeSnapshot(G0.node, (snapshot,)))
    return [action.model for action in actions if isinstance(action, Demote)]


def test_no_model_gets_the_memory_of_processes_that_several_share() -> None:
    """Eight GiB, of which two are theirs: seven models of one do not fit, and six do."""
    names = [f"m{number}" for number in range(8)]
    world = World(a_core("lb", models=tuple(model(name, memory_mb=1024) for name in names)))
    assert shared_by(world, 2048, *names[:5]) == []
    assert only(Prepare, world.arrive(request("r0", "m5"))).victims == ()
    world.free("g0")
    assert only(Prepare, world.arrive(request("r1", "m6"))).victims == ("m0",)


def test_models_leave_for_processes_that_several_share_and_may_come_back_later() -> None:
    names = [f"m{number}" for number in range(8)]
    world = World(a_core("lb", models=tuple(model(name, memory_mb=1024) for name in names)))
    assert shared_by(world, 0, *names) == []
    assert shared_by(world, 1024, *names) == ["m0"]
    assert shared_by(world, 0, *names[1:]) == []
    assert only(Prepare, world.arrive(request("r0", "m0"))).victims == ()
