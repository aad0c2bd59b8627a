"""The policy of ours for all grounds: each of its terms, and what it says of them."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from gpufaas.output.request_text import decision_text
from scheduler.composition import make_core
from scheduler.model.actions import Action, Dispatch, Prepare
from scheduler.model.events import ModelRegistered, RunFinished
from scheduler.model.values import (
    Configuration,
    CoreSettings,
    Explanation,
    GpuSpec,
    RequestId,
    SlotId,
)
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.workload import Arrivals, Pattern, thesis
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, only, placements
from tests.kit.outcomes import outcome

HOT, COLD, OTHER = "hot", "cold", "other"
MODELS = tuple(model(name, memory_mb=4096, load_s=2.0, run_s=1.0) for name in (HOT, COLD, OTHER))
# What switches each term off, all others as they are.
OFF: Mapping[str, Mapping[str, float]] = {
    name: {name: 0} for name in ("patience", "overlap", "lead_s", "most_batch")
}


def world_of(
    *holders: tuple[GpuSpec, str], watched: str = "", parameters: Mapping[str, float] | None = None
) -> World:
    """GPUs that each hold one model, at 100 s."""
    settings = CoreSettings(explain=frozenset({RequestId(watched)}))
    core = a_core("gain", gpus=(), models=MODELS, settings=settings, parameters=parameters)
    world = World(core)
    for spec, name in holders:
        (held,) = [each for each in MODELS if each.id == name]
        world.send(holding(spec, held))
    world.now = 100.0
    return world


def two_gpus(**parameters: float) -> World:
    """g0 holds hot and runs it; g1 holds cold and is idle, with room for one model more."""
    small, large = gpu("g0", memory_mb=4096), gpu("g1", memory_mb=8192)
    world = world_of((small, HOT), (large, COLD), watched="r2", parameters=parameters)
    world.arrive(request("r0", HOT))
    return world


def crowd(world: World) -> list[Action]:
    """Four more requests for hot."""
    return world.arrive(*(request(f"r{number}", HOT) for number in range(1, 5)))


def loaded_again(found: list[Action]) -> Dispatch:
    """The second of the crowd is worth a load."""
    dispatch = only(Dispatch, found)
    assert dispatch.rule == "one more copy saves more than it costs"
    assert dispatch.requests == ("r2",), "r1, the oldest one, will get the holder that comes free"
    return dispatch


def test_request_waits_for_its_holder_when_that_is_free_before_a_load_would_end() -> None:
    world = two_gpus()
    assert placements(world.arrive(request("r1", HOT))) == []
    assert placements(world.free("g0", at=101.0)) == [("r1", "g0")]


@pytest.mark.parametrize("overlap", [1, 0])
def test_load_goes_beside_runs_when_the_hardware_overlaps_them(overlap: int) -> None:
    found = crowd(two_gpus(overlap=overlap))
    loaded_again(found)
    assert only(Prepare, found).beside == bool(overlap)


@pytest.mark.parametrize(("overlap", "placed"), [(1, [("o0", "g0")]), (0, [])])
def test_busy_gpu_takes_a_load_when_its_runs_go_on_meanwhile(
    overlap: int, placed: list[tuple[str, str]]
) -> None:
    world = world_of((gpu("g0"), HOT), parameters={"overlap": overlap})
    world.arrive(request("r0", HOT))
    assert placements(world.arrive(request("o0", OTHER))) == placed


def why(dispatch: Dispatch) -> Explanation:
    assert dispatch.explanation is not None
    return dispatch.explanation


def test_explanation_has_each_terms_seconds_when_a_load_is_explained() -> None:
    explanation = why(loaded_again(crowd(two_gpus())))
    terms = {each.slot: each.terms for each in explanation.candidates}
    assert terms[SlotId("g0")] == {}, "to wait for the holder gains nothing"
    chosen = terms[explanation.chosen]
    assert chosen is not None
    assert chosen["waiting"] > 0.0
    assert chosen["coming"] > 0.0
    assert chosen["load"] == -2.0
    assert sum(chosen.values()) > 0.0
    text = decision_text(explanation)
    assert "weighed" in text
    assert "waiting" in text


def test_explanation_has_what_a_hit_saves_when_a_hit_is_explained() -> None:
    world = world_of((gpu("g0"), HOT), (gpu("g1"), COLD), watched="r")
    explanation = why(only(Dispatch, world.arrive(request("r", HOT))))
    by_slot = {each.slot: each.terms for each in explanation.candidates}
    assert by_slot[SlotId("g0")] == {"load": 2.0}
    assert by_slot[SlotId("g1")] == {"load": -2.0}


def test_explanation_has_no_terms_when_the_policy_weighs_nothing() -> None:
    settings = CoreSettings(explain=frozenset({RequestId("r")}))
    world = World(a_core("lalb", settings=settings))
    explanation = why(only(Dispatch, world.arrive(request("r"))))
    assert [each.terms for each in explanation.candidates] == [None]
    assert "weighed" not in decision_text(explanation)


@pytest.mark.parametrize(("near", "slot"), [("b", "b0"), (None, "a0")])
def test_hit_near_the_data_is_taken_when_the_request_names_a_node(
    near: str | None, slot: str
) -> None:
    world = world_of(*((gpu(name, node=name[0]), HOT) for name in ("a0", "b0")))
    assert only(Dispatch, world.arrive(request("r", HOT, near=near))).slot == slot


def learned(slowdown: float) -> World:
    """g0 runs cold, beside which hot takes so much longer; g1 is quiet, and was used more often."""
    specs = [gpu(name, leases=2, at_once=True) for name in ("g0", "g1")]
    world = world_of((specs[0], HOT), (specs[1], HOT))
    world.core.cluster.profiles.predict_slowdowns(lambda *_: slowdown)
    world.core.cluster.slots[SlotId("g1")].frequency = 5
    world.send(holding(specs[0], MODELS[0], MODELS[1]))
    assert only(Dispatch, world.arrive(request("c", COLD))).slot == "g0"
    return world


@pytest.mark.parametrize(("slowdown", "slot"), [(2.0, "g1"), (1.0, "g0")])
def test_hit_goes_to_a_quiet_gpu_when_runs_at_once_slow_each_other(
    slowdown: float, slot: str
) -> None:
    world = learned(slowdown)
    assert only(Dispatch, world.arrive(request("r", HOT))).slot == slot


def wide(name: str) -> GpuSpec:
    return gpu(name, slots=2, vcpus=4)


def test_configuration_goes_to_another_gpu_when_the_least_used_one_lacks_its_vcpus() -> None:
    """Alone hot takes a second; on four vCPUs a tenth, which alone meets its deadline."""
    world = world_of((wide("g0"), HOT), (wide("g1"), HOT))
    fast = Configuration(1, 4, 1)
    world.send(RunFinished(SlotId("g0.0"), ModelId(HOT), 1, 0.1, None, fast))
    urgent = [replace(request(f"r{number}", HOT), slo_s=0.3) for number in range(2)]
    first, second = (only(Dispatch, world.arrive(each)) for each in urgent)
    assert (first.configuration, second.configuration) == (fast, fast)
    assert {first.gpu, second.gpu} == {"g0", "g1"}


def test_explanation_has_what_the_batch_and_the_deadline_are_worth() -> None:
    world = world_of((wide("g0"), HOT), watched="r")
    fast = Configuration(1, 4, 1)
    world.send(RunFinished(SlotId("g0.0"), ModelId(HOT), 1, 0.1, None, fast))
    dispatch = only(Dispatch, world.arrive(replace(request("r", HOT), slo_s=0.3)))
    assert dispatch.configuration == fast
    (terms,) = [each.terms for each in why(dispatch).candidates if each.slot == dispatch.slot]
    assert terms is not None
    assert terms["batch"] == pytest.approx(0.73 - 0.1 * (4 * 0.034 + 0.67) / (0.034 + 0.67))
    assert terms["deadlines"] > 10.0


@pytest.mark.parametrize(("most_batch", "many"), [(16, 4), (0, 1)])
def test_requests_share_a_lease_when_a_batch_saves_time(most_batch: int, many: int) -> None:
    world = World(a_core("gain", gpus=(), models=(), parameters={"most_batch": most_batch}))
    times = {(1, "any"): 1.0, (4, "any"): 1.5}
    world.send(ModelRegistered(model(HOT, load_s=9.0, run_s=times)))
    world.send(holding(gpu("g0"), HOT))
    for number in range(5):
        world.arrive(replace(request(f"r{number}", HOT), function="t/f"))
    freed = only(Dispatch, world.free("g0", at=1.0))
    assert len(freed.requests) == many


@pytest.mark.parametrize(("lead_s", "first"), [(8.0, "calm"), (0.0, "flood")])
def test_calm_tenant_goes_first_when_another_one_floods_the_queue(
    lead_s: float, first: str
) -> None:
    world = world_of((gpu("g0"), HOT), parameters={"lead_s": lead_s})
    flood = [replace(request(f"f{n}", HOT), function="flood/f") for n in range(60)]
    world.arrive(*flood)
    world.arrive(replace(request("calm", HOT), function="calm/f"))
    served: list[str] = []
    while not any(name.startswith("calm") for name in served):
        world.now += 1.0
        served += [name for name, _ in placements(world.free("g0"))]
    assert (len(served) < 20) == (first == "calm")


def test_every_request_is_served_when_a_term_is_switched_off() -> None:
    workload = thesis(15, 160, 1, Pattern(Arrivals.POISSON), seed=3)

    def serve(parameters: Mapping[str, float]) -> int:
        engine = Engine(make_core("gain", parameters=parameters), Hardware(gpus=6), workload)
        return engine.run().tally.summary().requests

    wrong = {
        term: served
        for term, parameters in OFF.items()
        if (served := outcome(serve, parameters)) != len(workload.arrivals)
    }
    assert wrong == {}
