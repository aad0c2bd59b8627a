"""Why a request was placed where it was, for the requests that a person watches."""

import pytest

from scheduler.model.actions import Dispatch, EnqueueLocally
from scheduler.model.values import CoreSettings, Explanation, RequestId, SlotCandidate, SlotId
from tests.kit.cores.builders import a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, only

R0 = RequestId("r0")
BERT = model("bert", load_s=2.0, run_s=1.0)
GPT = model("gpt", memory_mb=4096, load_s=6.0, run_s=4.0)


def watching(policy: str = "lalb", **parameters: int) -> World:
    """r0 is watched; g0 is empty, g1 holds gpt, and small could not hold it."""
    settings = CoreSettings(explain=frozenset({R0}))
    world = World(
        a_core(
            policy,
            gpus=("g0", gpu("small", memory_mb=2048)),
            models=(BERT, GPT),
            settings=settings,
            parameters=parameters,
        )
    )
    world.send(holding(gpu("g1"), GPT))
    return world


def explained(world: World, *, at: float = 0.0) -> Explanation:
    dispatch = only(Dispatch, world.arrive(request("r0", "gpt"), at=at))
    assert dispatch.explanation is not None
    return dispatch.explanation


def test_dispatch_has_no_explanation_when_it_is_not_watched() -> None:
    assert only(Dispatch, watching().arrive(request("other"))).explanation is None


def test_explanation_names_every_gpu_that_could_have_taken_it_when_a_request_is_placed() -> None:
    explanation = explained(watching())
    assert (explanation.request, explanation.policy, explanation.chosen) == ("r0", "lalb", "g1")
    assert explanation.rule == "hit on another idle GPU"
    assert explanation.candidates == (
        SlotCandidate(SlotId("g1"), True, True, 0, wait_s=0.0, load_s=0.0, run_s=4.0),
        SlotCandidate(SlotId("g0"), True, False, 0, wait_s=0.0, load_s=6.0, run_s=4.0),
    )
    assert [each.finish_s for each in explanation.candidates] == [4.0, 10.0]


def test_explanation_shows_the_wait_when_the_better_gpu_is_busy() -> None:
    world = watching()
    world.arrive(request("first", "gpt"))
    queued = only(EnqueueLocally, world.arrive(request("r0", "gpt"), at=1.0))
    assert queued.explanation is not None
    (g1, g0) = queued.explanation.candidates
    assert (g1.slot, g1.idle, g1.wait_s, g1.frequency) == ("g1", False, 3.0, 1)
    assert (g0.slot, g0.idle, g0.wait_s, g0.frequency) == ("g0", True, 0.0, 0)


def test_explanation_shows_how_long_and_behind_which_requests_when_a_request_waited() -> None:
    world = watching("lb")
    for _ in range(3):
        world.arrive(request(f"busy{len(world.log)}"))
    world.arrive(request("ahead", "gpt"), request("r0", "gpt"), request("behind", "gpt"), at=1.0)
    world.free("g0", at=5.0)
    explanation = only(Dispatch, world.free("g1", at=7.0)).explanation
    assert explanation is not None
    assert (explanation.waited_s, explanation.decided_s) == (6.0, 7.0)
    assert (explanation.queue_length, explanation.ahead) == (2, 0)


def test_explanation_counts_visits_when_the_request_was_passed_over() -> None:
    world = watching("lalbo3", o3_limit=2)
    world.arrive(request("hold1", "gpt"), request("hold0"), request("hold2"))
    world.arrive(request("r0", "gpt"), request("a"), request("b"), request("c"))
    assert only(Dispatch, world.free("g0")).requests == ("a",)
    assert only(Dispatch, world.free("g0")).requests == ("b",)
    explanation = only(EnqueueLocally, world.free("g0")).explanation
    assert explanation is not None
    assert (explanation.chosen, explanation.visits) == ("g1", 2)


def test_explanation_names_the_victims_when_models_had_to_leave() -> None:
    settings = CoreSettings(explain=frozenset({R0}))
    world = World(a_core("lb", gpus=(), models=(BERT, GPT), settings=settings))
    world.send(holding(gpu("g0", memory_mb=4096), BERT))
    assert explained(world).victims == ("bert",)


@pytest.mark.parametrize("policy", ["rr", "rro3"])
def test_explanation_comes_twice_when_a_request_passes_through_a_local_queue(policy: str) -> None:
    actions = watching(policy).arrive(request("r0"))
    assert only(EnqueueLocally, actions).explanation is not None
    assert only(Dispatch, actions).explanation is not None
