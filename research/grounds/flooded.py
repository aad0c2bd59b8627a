"""A namespace that sends far more than the GPUs can serve, and one that does not, at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from cache_manager.model.ids import ModelId
from scheduler.core.core import Core
from scheduler.model.actions import Action, Dispatch
from scheduler.model.events import Event, RequestArrived, SlotFreed
from scheduler.model.values import LeaseId, RequestId
from scheduler.sim.model_catalogue import SimModel, working_set
from scheduler.sim.workload import MINUTE_S, Workload, popularity

_CALM, _FLOOD = "calm/", "flood/"
_FUNCTIONS = 10
_CALM_RATE, _MINUTES = 120, 4
_FLOOD_BEGINS_S, _FLOOD_LASTS_S = 60.0, 10.0


@dataclass(frozen=True, slots=True)
class FloodTraffic:
    """Ten functions of each of two namespaces; after a minute one sends `flood` calls at once."""

    flood: int

    def build(self, seed: int) -> Workload:
        random = Random(f"flood {seed}")
        models = working_set(2 * _FUNCTIONS)
        calm = [_named(model, _CALM) for model in models[:_FUNCTIONS]]
        flood = [_named(model, _FLOOD) for model in models[_FUNCTIONS:]]
        weights = popularity(_FUNCTIONS)
        end_s = _MINUTES * MINUTE_S
        many = _CALM_RATE * _MINUTES
        arrivals = [
            (random.uniform(0.0, end_s), model.id)
            for model in random.choices(calm, weights, k=many)
        ]
        arrivals += [
            (_FLOOD_BEGINS_S + random.uniform(0.0, _FLOOD_LASTS_S), model.id)
            for model in random.choices(flood, weights, k=self.flood)
        ]
        return Workload((*calm, *flood), tuple(sorted(arrivals)))


class CalmLatencies:
    """A core, with a note of how long each request of the calm namespace took."""

    def __init__(self, core: Core) -> None:
        self.latencies: list[float] = []
        self._core = core
        self._arrived_s: dict[RequestId, float] = {}
        self._leases: dict[LeaseId, Sequence[RequestId]] = {}

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        if isinstance(event, RequestArrived) and event.request.function.startswith(_CALM):
            self._arrived_s[event.request.id] = now
        elif isinstance(event, SlotFreed):
            for request in self._leases.pop(event.lease, ()):
                if request in self._arrived_s:
                    self.latencies.append(now - self._arrived_s.pop(request))
        actions = self._core.handle(event, now)
        for action in actions:
            if isinstance(action, Dispatch):
                self._leases[action.lease] = action.requests
        return actions


def _named(model: SimModel, namespace: str) -> SimModel:
    return replace(model, id=ModelId(namespace + model.id))
