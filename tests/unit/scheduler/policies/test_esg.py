"""ESG and TOGO on the core: batches, configurations, budgets to wait, and nobody starves."""

from msgspec.structs import replace

from cache_manager.model.ids import NodeId
from scheduler.model.actions import Dispatch, SetTimer
from scheduler.model.events import GpuJoined, TimerFired
from scheduler.model.values import Configuration, Request
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, only, placements

# A batch of four takes twice as long as one request.
BERT = model("bert", load_s=2.0, run_s={(1, "any"): 1.0, (2, "any"): 1.4, (4, "any"): 2.0})


def asked(name: str, stage: str = "", slo_s: float | None = None, near: str = "") -> Request:
    wanted = request(name, "bert", near=near or None)
    return replace(wanted, function="t/f", application="app", stage=stage, slo_s=slo_s)


def world(policy: str = "esg", *, slots: int = 1, vcpus: int = 0, **parameters: float) -> World:
    spec = gpu("g0", slots=slots, vcpus=vcpus)
    made = World(a_core(policy, gpus=[], models=[BERT], parameters=parameters))
    made.send(holding(spec, BERT))
    return made


def test_esg_runs_what_waits_as_one_batch_when_its_time_allows() -> None:
    it = world()
    it.arrive(*(asked(f"r{number}", slo_s=30.0) for number in range(5)))
    dispatch = only(Dispatch, it.free("g0", at=1.0))
    assert dispatch.requests == ("r1", "r2", "r3", "r4")
    assert dispatch.estimate.run_s == 2.0
    assert dispatch.rule == "warm; in time"


def test_esg_runs_fewer_together_when_time_is_short() -> None:
    it = world()
    it.arrive(*(asked(f"r{number}", slo_s=2.5) for number in range(5)))
    dispatch = only(Dispatch, it.free("g0", at=1.0))
    assert dispatch.requests == ("r1", "r2")


def test_esg_takes_the_fastest_when_it_is_too_late() -> None:
    it = world()
    it.arrive(*(asked(f"r{number}", slo_s=0.5) for number in range(5)))
    dispatch = only(Dispatch, it.free("g0", at=1.0))
    assert (dispatch.requests, dispatch.rule) == (("r1",), "warm; too late")


def test_stages_of_one_model_are_queues_of_their_own() -> None:
    it = world()
    it.arrive(*(asked(f"r{number}", f"s{number % 2}", 30.0) for number in range(5)))
    assert only(Dispatch, it.free("g0", at=1.0)).requests == ("r1", "r3")


def test_batch_takes_several_slots_when_one_is_too_slow() -> None:
    it = world(slots=2, vcpus=8)
    it.arrive(*(asked(f"r{number}", slo_s=30.0) for number in range(2)))
    it.arrive(*(asked(f"t{number}", slo_s=3.9) for number in range(4)))
    it.send(GpuJoined(gpu("g1", slots=4, vcpus=8, node="other")), at=2.0)
    given = [each for each in it.answers[-1] if isinstance(each, Dispatch)]
    assert sum(len(each.requests) for each in given) == 4
    assert any(each.more_slots for each in given)


def test_batch_waits_for_more_calls_no_longer_than_its_budget() -> None:
    it = world(fill_share=0.5)
    actions = it.arrive(asked("r0", slo_s=2.0))
    assert placements(actions) == []
    assert only(SetTimer, actions) == SetTimer(0.5, TimerFired())
    it.arrive(asked("r1", slo_s=2.0), at=0.2)
    dispatch = only(Dispatch, it.send(TimerFired(), at=0.5))
    assert dispatch.requests == ("r0", "r1")
    assert dispatch.rule == "warm; in time, after its batch could fill"


def test_batch_does_not_wait_when_its_oldest_request_has_no_time_to_spare() -> None:
    assert placements(world(fill_share=1.0).arrive(asked("r0", slo_s=0.9))) == [("r0", "g0")]


def test_stage_runs_near_its_data_when_that_node_is_warm() -> None:
    it = World(a_core("esg", gpus=[], models=[BERT]))
    for name in ("g0", "g1", "g2"):
        it.send(holding(gpu(name, node=f"n-{name}"), BERT))
    assert placements(it.arrive(asked("r0", near=NodeId("n-g1")))) == [("r0", "g1")]


def test_togo_is_netgain_for_one_request_and_batches_several() -> None:
    it = world("togo")
    first = only(Dispatch, it.arrive(asked("r0", slo_s=30.0)))
    assert (first.rule, first.configuration) == ("hit on an idle GPU", None)
    it.arrive(*(asked(f"r{number}", slo_s=30.0) for number in range(1, 5)))
    dispatch = only(Dispatch, it.free("g0", at=1.0))
    assert dispatch.requests == ("r1", "r2", "r3", "r4")
    assert dispatch.rule == "hit on an idle GPU, as a batch"


def test_togo_gives_vcpus_where_a_manager_takes_them() -> None:
    it = world("togo", vcpus=4)
    it.arrive(*(asked(f"r{number}", slo_s=30.0) for number in range(3)))
    dispatch = only(Dispatch, it.free("g0", at=1.0))
    assert dispatch.configuration == Configuration(2, 1, 1)
