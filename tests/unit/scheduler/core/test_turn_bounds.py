"""No namespace is starved: how much of others' work may go before a request has a bound.

Told from outside, while all namespaces have more to do than the GPUs can. From when a request may
be placed until it is, its namespace's rivals are given, each by its weight, at most the work that
the cluster does in twice the lead and twice the greatest head start, and one request each:
a request is exposed at most one lead after the first turn, others at most one lead after its own,
and a head start moves either by no more than itself. What a request takes is known here from the
start; where it is only estimated, a correction moves a namespace's turn by as much.
"""

from collections import defaultdict
from random import Random

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Standing
from scheduler.composition import make_core
from scheduler.model.actions import Dispatch, EnqueueLocally
from scheduler.model.events import (
    Event,
    GpuJoined,
    ModelRegistered,
    RequestArrived,
    SlotFreed,
    TermsSet,
)
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import RequestId
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World
from tests.kit.cores.life_lengths import life_length

_GPUS = 3
_MOST_RUN_S = 2.0
_FUNCTIONS = 3
_TURNS = 1_800


class FloodedCluster:
    """Namespaces that always have requests that wait, and what each was given."""

    def __init__(self, lead_s: float, weights: tuple[float, ...], head_s: int, seed: int) -> None:
        self.random = Random(seed)
        self.lead_s, self.weights, self.head_s = lead_s, weights, head_s
        self.world = World(make_core("fair", parameters={"lead_s": lead_s}))
        self.given: dict[str, float] = defaultdict(float)
        self._number = 0
        self._seen: dict[RequestId, dict[str, float]] = {}
        self.worst = 0.0
        self._left: set[RequestId] = set()
        for event in self._setup():
            self.world.send(event)
        for _ in range(20):
            for space in range(len(weights)):
                self._arrive(space)

    def _setup(self) -> list[Event]:
        spaces = range(len(self.weights))
        models = [
            ModelRegistered(model(f"t{space}/m{n}", load_s=0.0, run_s=_MOST_RUN_S / (n + 1)))
            for space in spaces
            for n in range(_FUNCTIONS)
        ]
        terms = [TermsSet(f"t{n}", OwnerTerms(weight=self.weights[n])) for n in spaces]
        return [*models, *terms, *(GpuJoined(gpu(f"g{n}", memory_mb=4096)) for n in range(_GPUS))]

    def _arrive(self, space: int) -> None:
        self._number += 1
        chosen = self.random.randrange(_FUNCTIONS)
        priority = self.random.randint(-self.head_s, self.head_s)
        asked = request(f"r{self._number}", f"t{space}/m{chosen}", priority=priority)
        self._send(RequestArrived(replace(asked, function=f"t{space}/f{chosen}")))

    def next(self) -> None:
        """The lease that is due first ends; its namespace sends as many requests as it lacks."""
        lease = min(self.world.leases.values(), key=lambda each: (each.done_s, each.id))
        space = int(self.world.sent[lease.requests[0]].function[1])
        self.world.now = lease.done_s
        self._arrive(space)
        self._send(SlotFreed(lease.slot, lease.id))

    def _send(self, event: Event) -> None:
        for action in self.world.send(event):
            if isinstance(action, Dispatch):
                (placed,) = action.requests
                self._placed(placed)
            elif isinstance(action, EnqueueLocally):
                self._placed(action.request)
        for each in self.world.core.requests.values():
            if each.standing is Standing.WAITING:
                self._seen.setdefault(each.id, dict(self.given))

    def _placed(self, placed: RequestId) -> None:
        """A request leaves the queue for all slots, to one of them."""
        if placed in self._left:
            return
        self._left.add(placed)
        asked = self.world.sent[placed]
        mine = asked.function.partition("/")[0]
        before = self._seen.pop(placed, None)
        if before is not None:
            for space, weight in enumerate(self.weights):
                name = f"t{space}"
                if name != mine:
                    overtaking_s = self.given[name] - before.get(name, 0.0)
                    spare_s = overtaking_s - _MOST_RUN_S
                    self.worst = max(self.worst, spare_s / self._bound_s(weight))
        self.given[mine] += _run_s(asked.models[0])

    def _bound_s(self, weight: float) -> float:
        pace = _GPUS / sum(self.weights)
        return (2 * self.lead_s + 2 * self.head_s) * pace * weight

    def exposed_s(self, space: int) -> float:
        """The work of a namespace that may be placed now."""
        return sum(
            _run_s(each.models[0])
            for each in self.world.core.requests.values()
            if each.standing is Standing.WAITING and each.request.function.startswith(f"t{space}/")
        )


def _run_s(model_id: ModelId) -> float:
    return _MOST_RUN_S / (int(model_id[-1]) + 1)


@pytest.mark.parametrize("lead_s", [0.5, 4.0])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0, 4.0), (0.5, 8.0)])
@pytest.mark.parametrize("head_s", [0, 3])
def test_no_request_is_overtaken_by_more_than_the_bound(
    lead_s: float, weights: tuple[float, ...], head_s: int
) -> None:
    flooded = FloodedCluster(lead_s, weights, head_s, seed=7)
    pace = _GPUS / sum(weights)
    turns = life_length(_TURNS)
    for _ in range(turns):
        flooded.next()
        for space, weight in enumerate(weights):
            most_s = (lead_s + 2 * head_s) * pace * weight + _MOST_RUN_S
            assert flooded.exposed_s(space) <= most_s + 1e-6
    assert flooded.worst <= 1.0
    whole = sum(flooded.given.values())
    most = max(0.05, 30.0 / turns)  # a short life ends in the middle of somebody's turns
    for space, weight in enumerate(weights):
        share = flooded.given[f"t{space}"] / whole
        assert share == pytest.approx(weight / sum(weights), abs=most)
