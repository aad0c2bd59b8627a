"""Estimates: declared, measured, blended, scaled or assumed, but never missing."""

import pytest

from cache_manager.model.ids import ModelId, Tier
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.events import ModelLoaded, ModelRegistered, RunFinished
from scheduler.model.profiles import Profiles
from scheduler.model.values import CoreSettings, Estimate, SlotId
from tests.kit.cores.builders import GIB, a_core, gpu, model, request
from tests.kit.cores.core_world import World, only

BERT = ModelId("bert")
G0 = gpu("g0").id
SLOT = SlotId("g0")


def estimate_of(world: World, *, name: str = "bert", batch: int = 1) -> Estimate:
    """What the next request on g0 is expected to take."""
    request_id = f"probe{len(world.log)}"
    estimate = only(Dispatch, world.arrive(request(request_id, name, batch=batch))).estimate
    world.free("g0")
    return estimate


def world_with(run_s: dict[tuple[int, str], float], gpu_type: str = "any") -> World:
    spec = gpu("g0", gpu_type=gpu_type)
    return World(a_core("lb", gpus=(spec,), models=(model("bert", run_s=run_s),)))


# -- defaults -------------------------------------------------------------------------------------


def test_model_never_seen_has_estimates_when_it_is_asked_for() -> None:
    settings = CoreSettings(default_load_s=7.0, default_run_s=0.25)
    world = World(a_core("lb", settings=settings))
    assert estimate_of(world, name="stranger") == Estimate(7.0, 0.25)


def test_model_never_seen_takes_the_default_memory_when_it_is_placed() -> None:
    settings = CoreSettings(default_memory_bytes=5 * GIB)
    world = World(a_core("lb", settings=settings))
    world.arrive(request("r0", "stranger"))
    world.free("g0")
    (load,) = only(Prepare, world.arrive(request("r1", "other stranger"))).loads
    assert load.memory_bytes == 5 * GIB


def test_estimate_is_the_declaration_when_nothing_was_measured() -> None:
    assert estimate_of(World(a_core("lb"))) == Estimate(2.0, 1.0)


def test_estimate_has_no_load_when_the_model_is_resident() -> None:
    world = World(a_core("lb"))
    estimate_of(world)
    assert estimate_of(world) == Estimate(0.0, 1.0)


def test_estimate_is_the_sum_when_a_request_needs_several_models() -> None:
    models = (model("a", load_s=1.0, run_s=0.5), model("b", load_s=3.0, run_s=2.0))
    world = World(a_core("lb", models=models))
    dispatch = only(Dispatch, world.arrive(request("r0", "a", "b")))
    assert dispatch.estimate == Estimate(4.0, 2.5)


# -- run times by batch and GPU type --------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "gpu_type", "batch", "run_s"),
    [
        ({(1, "any"): 1.0, (1, "h200"): 0.5}, "h200", 1, 0.5),
        ({(1, "any"): 1.0, (1, "h200"): 0.5}, "a10", 1, 1.0),
        ({(1, "h200"): 0.5}, "a10", 1, 0.5),
        ({(1, "any"): 1.0}, "any", 8, 8.0),
        ({(8, "any"): 4.0}, "any", 1, 4.0),
        ({(1, "any"): 1.0, (8, "any"): 2.0}, "any", 7, 2.0),
        ({(1, "any"): 1.0, (8, "any"): 2.0}, "any", 16, 4.0),
    ],
    ids=[
        "own type",
        "any type",
        "another type",
        "larger batch scales",
        "smaller batch does not",
        "nearest batch",
        "nearest batch scales",
    ],
)
def test_run_estimate_comes_from_the_nearest_when_it_is_not_known(
    known: dict[tuple[int, str], float], gpu_type: str, batch: int, run_s: float
) -> None:
    assert estimate_of(world_with(known, gpu_type), batch=batch).run_s == run_s


def test_gpus_that_differ_in_type_have_their_own_times_when_runs_are_measured() -> None:
    gpus = (gpu("g0", gpu_type="h200"), gpu("g1", gpu_type="a10"))
    world = World(a_core("lb", gpus=gpus))
    first = only(Dispatch, world.arrive(request("r0")))
    assert first.slot == "g0"
    world.send(RunFinished(SLOT, BERT, 1, 0.0))
    assert only(Dispatch, world.arrive(request("r1"))).estimate.run_s == 1.0
    world.free("g0")
    world.arrive(request("r2"))
    assert only(Dispatch, world.answers[-1]).estimate.run_s == pytest.approx(0.7)


# -- measured -------------------------------------------------------------------------------------


def test_run_estimate_moves_by_the_weight_when_a_run_is_measured() -> None:
    world = World(a_core("lb", settings=CoreSettings(report_weight=0.25)))
    world.send(RunFinished(SLOT, BERT, 1, 3.0))
    assert estimate_of(world).run_s == pytest.approx(1.0 + 0.25 * 2.0)
    world.send(RunFinished(SLOT, BERT, 1, 3.0))
    assert estimate_of(world).run_s == pytest.approx(1.5 + 0.25 * 1.5)


def test_run_estimate_is_the_measurement_when_nothing_was_declared() -> None:
    world = World(a_core("lb"))
    world.send(RunFinished(SLOT, ModelId("stranger"), 1, 0.125))
    assert estimate_of(world, name="stranger").run_s == 0.125


def test_load_estimate_moves_by_the_weight_when_a_load_is_measured() -> None:
    settings = CoreSettings(report_weight=0.5)
    world = World(a_core("lb", settings=settings, models=(model("bert", memory_mb=8000), "gpt")))
    world.arrive(request("r0"))
    world.send(ModelLoaded(G0, BERT, 4.0, Tier.ABSENT), at=4.0)
    world.free("g0")
    estimate_of(world, name="gpt")
    assert estimate_of(world).load_s == pytest.approx(3.0)


def test_load_estimate_of_a_tier_is_that_of_the_next_slower_when_it_is_not_known() -> None:
    loads = {Tier.DISK: 3.0, Tier.ABSENT: 9.0}
    world = World(a_core("lb", models=(model("bert", load_s=loads),)))
    index = world.core.cluster.index
    index.set_tier(gpu("g0").node, BERT, Tier.HOST)
    assert estimate_of(world).load_s == 3.0


def test_declaration_changes_nothing_when_the_times_were_measured() -> None:
    world = World(a_core("lb"))
    world.send(RunFinished(SLOT, ModelId("stranger"), 1, 0.125))
    world.send(ModelRegistered(model("stranger", run_s=9.0)))
    assert estimate_of(world, name="stranger").run_s == 0.125


def test_calls_that_ran_as_one_are_a_run_of_a_larger_batch_and_usual_in_parts() -> None:
    profiles = Profiles(CoreSettings())
    profiles.report_run(BERT, 2, "h200", 0.010, together=4)
    assert profiles.known[BERT].run_s == {(8, "h200"): pytest.approx(0.040)}
    assert profiles.usual_run_s(BERT) == pytest.approx(0.010)
    profiles.report_run(BERT, 2, "h200", 0.030)
    assert profiles.run_s(BERT, 2, "h200") == pytest.approx(0.030)
    assert profiles.run_s(BERT, 8, "h200") == pytest.approx(0.040)
