"""Stands before a core and notes what each tenant was given: waits, hits and GPU time."""

from collections import defaultdict
from collections.abc import Sequence

from scheduler.core.core import Core
from scheduler.core.tenants.owner_table import namespace_of
from scheduler.model.actions import Action, Dispatch
from scheduler.model.events import Event, RequestArrived, SlotFreed
from scheduler.model.values import LeaseId, RequestId


class TenantRecorder:
    """Hands every event to its core; one request has one lease of one slot, as simulated."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._arrived: dict[RequestId, tuple[str, float]] = {}
        self._leases: dict[LeaseId, tuple[RequestId, float]] = {}
        self.latencies: dict[str, list[float]] = defaultdict(list)
        self.hits: dict[str, int] = defaultdict(int)
        self.placed: dict[str, int] = defaultdict(int)
        self.spans: list[tuple[str, float, float]] = []

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        """Note the event and what the core answers."""
        if isinstance(event, RequestArrived):
            asked = event.request
            self._arrived[asked.id] = namespace_of(asked.function), now
        elif isinstance(event, SlotFreed):
            request, began_s = self._leases.pop(event.lease)
            tenant, arrived_s = self._arrived.pop(request)
            self.latencies[tenant].append(now - arrived_s)
            self.spans.append((tenant, began_s, now))
        actions = self._core.handle(event, now)
        for action in actions:
            if isinstance(action, Dispatch):
                (request,) = action.requests
                self._leases[action.lease] = request, now
                tenant = self._arrived[request][0]
                self.placed[tenant] += 1
                self.hits[tenant] += action.hit
        return actions

    def hit_ratio(self, tenant: str | None = None) -> float:
        """The share of placements that found their models; of all tenants, if none is named."""
        if tenant is not None:
            return self.hits[tenant] / max(1, self.placed[tenant])
        return sum(self.hits.values()) / max(1, sum(self.placed.values()))

    def used_s(self, tenant: str, begins_s: float, ends_s: float) -> float:
        """The GPU time that a tenant had between two times."""
        return sum(
            max(0.0, min(ended_s, ends_s) - max(began_s, begins_s))
            for name, began_s, ended_s in self.spans
            if name == tenant
        )
