"""The five thesis policies place exactly as their literal version does, whatever happens."""

from collections.abc import Iterable, Mapping
from random import Random

import pytest
from hypothesis import given

from scheduler.composition import make_core
from scheduler.model.actions import Action, Dispatch, EnqueueLocally, Finish, Prepare
from scheduler.model.events import Event
from scheduler.model.values import RequestOutcome
from tests.kit.cores import naive_scheduler
from tests.kit.cores.life_lengths import life_length
from tests.kit.cores.random_workloads import (
    KINDS,
    Operation,
    Workload,
    operations,
    random_operations,
)

pytestmark = pytest.mark.group("oracle", seconds=160)

CASES = [
    ("rr", {}),
    ("rro3", {}),
    ("lb", {}),
    ("lalb", {}),
    *(("lalbo3", {"o3_limit": limit}) for limit in (0, 1, 3, 25)),
]
STEADY = ("arrive",) * 10 + ("due",) * 9 + ("free", "cancel")
STORMY = STEADY * 5 + ("join", "drain", "lose", "lose", "join", "join", "silent", "heard", "heard")
each_case = pytest.mark.parametrize(("policy", "parameters"), CASES)


@each_case
@given(operations=operations)
def test_policy_places_like_the_oracle_when_anything_happens(
    policy: str, parameters: Mapping[str, int], operations: list[Operation]
) -> None:
    compare(policy, parameters, Workload(), operations)


@each_case
@given(operations=operations)
def test_policy_places_like_the_oracle_when_gpus_are_few_and_requests_many(
    policy: str, parameters: Mapping[str, int], operations: list[Operation]
) -> None:
    crowd: list[Operation] = [("arrive", n * 7, n * 5, 0) for n in range(20)]
    compare(policy, parameters, Workload(model_count=5, gpu_count=2), [*crowd, *operations])


@each_case
def test_policy_places_like_the_oracle_when_the_cluster_is_large(
    policy: str, parameters: Mapping[str, int]
) -> None:
    random = Random(f"{policy} {parameters} 1")
    crowd = [("arrive", random.randrange(4096), random.randrange(64), 0) for _ in range(500)]
    storm = random_operations(random, life_length(4000), STORMY)
    compare(policy, parameters, Workload(model_count=90, gpu_count=200), [*crowd, *storm])


@each_case
def test_policy_places_like_the_oracle_when_it_runs_long(
    policy: str, parameters: Mapping[str, int]
) -> None:
    random = Random(f"{policy} {parameters}")
    crowd = [("arrive", random.randrange(4096), random.randrange(64), 0) for _ in range(40)]
    steady = random_operations(random, life_length(8000), STEADY * 20 + KINDS)
    compare(policy, parameters, Workload(model_count=24, gpu_count=12), [*crowd, *steady])


def compare(
    policy: str,
    parameters: Mapping[str, int],
    workload: Workload,
    operations: Iterable[Operation],
) -> None:
    """Run both, event by event; what becomes of requests must be the same, in the same order."""
    core = make_core(policy, parameters=parameters)
    oracle = naive_scheduler.NaiveScheduler(policy, **parameters)
    events: list[tuple[Event, float]] = []

    def step(event: Event) -> None:
        events.append((event, workload.now))
        actions = core.handle(event, workload.now)
        expected = oracle.handle(event, workload.now)
        assert answer(actions) == expected, f"after {len(events)} events, at {events[-3:]}"
        for action in actions:
            workload.apply(action)

    for event in workload.setup():
        step(event)
    for operation in operations:
        happened = workload.event(operation)
        if happened is not None:
            step(happened)


def answer(actions: list[Action]) -> list[naive_scheduler.Outcome]:
    """What the core's actions make of requests, in the oracle's words."""
    victims = {action.lease: action.victims for action in actions if isinstance(action, Prepare)}
    found: list[naive_scheduler.Outcome] = refusals(actions)
    for action in actions:
        if isinstance(action, Dispatch):
            assert action.hit == (action.lease not in victims)
            (request,) = action.requests
            gone = victims.get(action.lease, ())
            found.append(naive_scheduler.NaivePlacement(request, action.slot, action.hit, gone))
        elif isinstance(action, EnqueueLocally):
            found.append(naive_scheduler.NaiveEnqueuing(action.request, action.slot))
    return found


def refusals(actions: list[Action]) -> list[naive_scheduler.Outcome]:
    """In an order of their own: the order of refusals means nothing."""
    finishes = [action for action in actions if isinstance(action, Finish)]
    refused = [each.request for each in finishes if each.outcome is RequestOutcome.TOO_LARGE]
    return [naive_scheduler.NaiveRefusal(request) for request in sorted(refused)]
