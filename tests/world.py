"""A core with what a driver would remember: the time, every event sent, the leases in force."""

from dataclasses import dataclass, field

from cache_manager.model import ModelId
from scheduler.actions import Action, Dispatch, EnqueueLocally, Finish, Prepare
from scheduler.core import Core
from scheduler.events import (
    Event,
    GpuLost,
    LeaseReleased,
    RequestArrived,
    SlotFreed,
)
from scheduler.model import LeaseId, Outcome, Request, RequestId, SlotId


@dataclass
class HeldLease:
    """A lease in force, as its GPU manager knows it; a prefetch has no requests."""

    id: LeaseId
    slot: SlotId
    models: tuple[ModelId, ...]
    done_s: float
    requests: tuple[RequestId, ...] = ()


@dataclass
class World:
    """Sends events, keeps what came back, and frees slots on demand."""

    core: Core
    now: float = 0.0
    log: list[tuple[Event, float]] = field(default_factory=list)
    answers: list[list[Action]] = field(default_factory=list)
    leases: dict[LeaseId, HeldLease] = field(default_factory=dict)
    ends: dict[RequestId, list[Outcome]] = field(default_factory=dict)

    def send(self, event: Event, at: float | None = None) -> list[Action]:
        """Hand one event to the core, and keep the books by its answer."""
        self.now = self.now if at is None else at
        self.log.append((event, self.now))
        if isinstance(event, SlotFreed):
            self.leases.pop(event.lease, None)
        if isinstance(event, GpuLost):
            self.forget_gpu(event)
        actions = self.core.handle(event, self.now)
        self.answers.append(actions)
        for action in actions:
            self._note(action)
        return actions

    def _note(self, action: Action) -> None:
        if isinstance(action, Prepare):
            models = tuple(load.model for load in action.loads)
            self.leases[action.lease] = HeldLease(action.lease, action.slot, models, self.now)
        elif isinstance(action, Dispatch):
            models = self.models_of(action.requests[0])
            done_s = self.now + action.estimate.total_s
            self.leases[action.lease] = HeldLease(
                action.lease, action.slot, models, done_s, action.requests
            )
        elif isinstance(action, Finish):
            self.ends.setdefault(action.request, []).append(action.outcome)

    def forget_gpu(self, event: GpuLost) -> None:
        """What a lost GPU held is over without a report."""
        gpu = self.core.cluster.gpus.get(event.gpu)
        slots = {slot.id for slot in gpu.slots} if gpu is not None else set()
        for lease in [each for each in self.leases.values() if each.slot in slots]:
            del self.leases[lease.id]

    def models_of(self, request: RequestId) -> tuple[ModelId, ...]:
        """The models that a request that was sent asks for."""
        return self.requests_sent()[request].models

    def requests_sent(self) -> dict[RequestId, Request]:
        return {e.request.id: e.request for e, _ in self.log if isinstance(e, RequestArrived)}

    # -- what tests do most -----------------------------------------------------------------------

    def arrive(self, *requests: Request, at: float | None = None) -> list[Action]:
        """Let requests arrive, one after the other, at one time."""
        return [action for each in requests for action in self.send(RequestArrived(each), at)]

    def lease_on(self, slot: str) -> LeaseId:
        """The oldest lease in force on a slot."""
        return min(lease.id for lease in self.leases.values() if lease.slot == slot)

    def lease_of(self, request: str) -> LeaseId:
        """The latest lease that was given to a request."""
        return max(lease.id for lease in self.leases.values() if request in lease.requests)

    def release(self, slot: str, *, may_return: bool = False) -> list[Action]:
        return self.send(LeaseReleased(self.lease_on(slot), may_return))

    def free(self, slot: str, at: float | None = None) -> list[Action]:
        """The manager ends the oldest lease on a slot."""
        return self.send(SlotFreed(SlotId(slot), self.lease_on(slot)), at)

    def occupy(self, *slots: str) -> None:
        """Keep slots busy with requests for models made for it, which hold a tiny place."""
        raise NotImplementedError(slots)


def placements(actions: list[Action]) -> list[tuple[str, str]]:
    """Which request went to which slot, by a lease or to its local queue, in order."""
    found: list[tuple[str, str]] = []
    for action in actions:
        if isinstance(action, Dispatch):
            found += [(request, action.slot) for request in action.requests]
        elif isinstance(action, EnqueueLocally):
            found.append((action.request, f"queue of {action.slot}"))
    return found


def ended(actions: list[Action]) -> dict[str, Outcome]:
    """How the requests that ended with these actions ended."""
    return {each.request: each.outcome for each in actions if isinstance(each, Finish)}
