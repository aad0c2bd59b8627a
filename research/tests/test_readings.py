"""The readings of the thesis: what each one changes, and that the usual ones change nothing."""

import pytest

from cache_manager import eviction
from research.thesis.readings import Readings, SharedTraffic
from scheduler import policies
from scheduler.composition import compose
from scheduler.model.actions import Dispatch, EnqueueLocally, Prepare
from scheduler.model.errors import BadParameter
from scheduler.model.events import GpuJoined, ModelRegistered
from scheduler.model.values import CoreSettings, ModelSpec
from scheduler.sim.model_catalogue import table1
from scheduler.sim.study import Traffic
from tests.kit.cores.builders import gpu, holding, model, request
from tests.kit.cores.core_world import World, only

USUAL = Readings()
HALF_A_GPU = tuple(model(name, memory_mb=4000) for name in ("a", "b", "c"))


def world_of(
    readings: Readings, policy: str, models: tuple[ModelSpec, ...], gpus: tuple[str, ...] = ("g0",)
) -> World:
    rule = eviction.make("lru")
    core = compose(readings.policy(policy, {}), rule, readings.core_settings(), policy_name=policy)
    world = World(core)
    for each in models:
        world.send(ModelRegistered(each))
    for name in gpus:
        world.send(GpuJoined(gpu(name)))
    return world


@pytest.mark.parametrize(
    ("readings", "victim"), [(USUAL, "b"), (Readings(spares_waiting=False), "a")]
)
def test_plain_lru_evicts_what_a_local_queue_waits_for(readings: Readings, victim: str) -> None:
    world = world_of(readings, "rr", HALF_A_GPU)
    world.arrive(request("r0", "a"), request("r1", "b"), request("r2", "c"), request("r3", "a"))
    world.free("g0")

    assert only(Prepare, world.free("g0")).victims == (victim,)


@pytest.mark.parametrize(
    ("readings", "slots"),
    [(USUAL, ["g0", "g1", "g0"]), (Readings(counts_dispatches=True), ["g0", "g0", "g0"])],
)
def test_frequency_can_leave_out_what_waits_in_local_queues(
    readings: Readings, slots: list[str]
) -> None:
    world = world_of(readings, "rr", HALF_A_GPU, ("g0", "g1"))
    world.arrive(request("r0", "a"), request("r1", "a"))
    queued = [
        only(EnqueueLocally, world.arrive(request(f"r{number}", "a"))) for number in (2, 3, 4)
    ]

    assert [each.slot for each in queued] == slots


def test_frequency_of_dispatches_counts_a_request_once_it_leaves_the_local_queue() -> None:
    world = world_of(Readings(counts_dispatches=True), "rr", HALF_A_GPU, ("g0", "g1"))
    world.arrive(request("r0", "a"), request("r1", "a"), request("r2", "a"))
    assert only(Dispatch, world.free("g0")).requests == ("r2",)

    assert only(EnqueueLocally, world.arrive(request("r3", "a"))).slot == "g1"


@pytest.mark.parametrize(("window", "first"), [(0, "hit"), (3, "hit"), (2, "head"), (1, "head")])
def test_window_bounds_how_far_rro3_looks(window: int, first: str) -> None:
    world = world_of(Readings(rro3_window=window), "rro3", HALF_A_GPU)
    world.arrive(request("r0", "a"))
    world.arrive(request("head", "b"), request("second", "c"), request("hit", "a"))

    assert only(Dispatch, world.free("g0")).requests == (first,)


@pytest.mark.parametrize("policy", ["lalb", "lalbo3"])
@pytest.mark.parametrize(("readings", "slot"), [(USUAL, "g1"), (Readings(takes_first=True), "g0")])
def test_loop_as_printed_takes_the_least_used_busy_gpu_that_is_soon_enough(
    policy: str, readings: Readings, slot: str
) -> None:
    """g0 has run one request and is busy for 4 s, g1 two, and is busy for 1 s; a load takes 6 s."""
    bert, long = model("bert", load_s=6.0, run_s=1.0), model("long", load_s=1.0, run_s=4.0)
    world = world_of(readings, policy, (bert, long), ("g2",))
    world.send(holding(gpu("g0"), long, bert))
    world.send(holding(gpu("g1"), bert))
    world.arrive(request("r0", "bert"))
    assert only(Dispatch, world.arrive(request("r1", "bert"))).slot == "g1"
    world.free("g0")
    world.free("g1")
    assert only(Dispatch, world.arrive(request("r2", "long"))).slot == "g0"
    assert only(Dispatch, world.arrive(request("r3", "bert"))).slot == "g1"

    assert only(EnqueueLocally, world.arrive(request("r4", "bert"))).slot == slot


def test_usual_readings_are_the_policies_and_settings_that_run_live() -> None:
    for name in policies.available():
        assert USUAL.policy(name, {}) == policies.make(name)
    assert USUAL.core_settings() == CoreSettings()
    assert USUAL.words() == ()


def test_readings_leave_a_run_alone_whose_policy_does_not_obey_them() -> None:
    every = Readings(False, True, True, 2, True, True, True)

    assert every.of_run("lb") == USUAL
    assert every.of_run("rr") == Readings(spares_waiting=False, counts_dispatches=True)
    assert every.of_run("rro3").rro3_window == 2
    assert every.of_run("lalb").takes_first


def test_readings_refuse_a_window_below_zero() -> None:
    with pytest.raises(BadParameter, match="window"):
        Readings(rro3_window=-1)


def test_functions_beyond_the_table_share_its_models() -> None:
    own, shared = (kind(working_set=35).build(seed=1) for kind in (Traffic, SharedTraffic))

    assert len(own.models) == 35
    assert {each.id for each in shared.models} == set(table1())
    assert [at_s for at_s, _ in own.arrivals] == [at_s for at_s, _ in shared.arrivals]
    assert [each.partition("#")[0] for _, each in own.arrivals] == [
        each for _, each in shared.arrivals
    ]
