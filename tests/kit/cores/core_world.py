"""A core with what a driver would remember: the time, every event sent, the leases in force."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.cluster.slots import ActiveLease
from scheduler.core.core import Core
from scheduler.model.actions import (
    Action,
    Dispatch,
    EnqueueLocally,
    Finish,
    Prepare,
    Recall,
    Refuse,
    SetTimer,
    Taken,
)
from scheduler.model.events import (
    Event,
    GpuLost,
    GpuSnapshot,
    LeaseReleased,
    LiveLease,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    NodeSnapshot,
    RequestArrived,
    SlotFreed,
    StageDue,
)
from scheduler.model.values import (
    Configuration,
    LeaseId,
    Request,
    RequestId,
    RequestOutcome,
    SlotId,
)

_Kind = TypeVar("_Kind")


@dataclass
class HeldLease:
    """A lease in force, as its GPU manager knows it; a prefetch has no requests.

    `models` are those in use under it whose copy on the GPU was not lost meanwhile.
    """

    id: LeaseId
    slot: SlotId
    gpu: GpuId
    models: set[ModelId]
    done_s: float
    requests: tuple[RequestId, ...] = ()
    more_slots: tuple[SlotId, ...] = ()
    configuration: Configuration | None = None

    @property
    def live(self) -> LiveLease:
        """The lease as its GPU manager reports it."""
        models, given = tuple(sorted(self.models)), self.configuration
        return LiveLease(self.id, self.slot, models, self.requests, self.more_slots, given)


@dataclass
class World:
    """Sends events, keeps what came back, and frees slots on demand."""

    core: Core
    now: float = 0.0
    log: list[tuple[Event, float]] = field(default_factory=list)
    answers: list[list[Action]] = field(default_factory=list)
    sent: dict[RequestId, Request] = field(default_factory=dict)
    leases: dict[LeaseId, HeldLease] = field(default_factory=dict)
    ends: dict[RequestId, list[RequestOutcome]] = field(default_factory=dict)
    recalled: list[LeaseId] = field(default_factory=list)
    stages: list[tuple[float, StageDue]] = field(default_factory=list)
    loads: dict[GpuId, set[ModelId]] = field(default_factory=dict)
    beside: set[LeaseId] = field(default_factory=set)
    aside: set[LeaseId] = field(default_factory=set)

    def send(self, event: Event, at: float | None = None) -> list[Action]:
        """Hand one event to the core, and keep the books by its answer."""
        self.now = self.now if at is None else at
        self.log.append((event, self.now))
        self._note_event(event)
        nodes, known = self._known() if isinstance(event, NodeSnapshot) else ({}, {})
        actions = self.core.handle(event, self.now)
        self.answers.append(actions)
        if isinstance(event, NodeSnapshot) and not refused(actions):
            self._note_snapshot(event, nodes, known)
        for action in actions:
            self._note(action)
        for gpu_id, models in self.loads.items():  # what has left is loaded no more
            gpu = self.core.cluster.gpus.get(gpu_id)
            models.intersection_update(() if gpu is None else gpu.cache.residents)
        return actions

    def _note_event(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self.sent.setdefault(event.request.id, event.request)
        elif isinstance(event, SlotFreed):
            self.leases.pop(event.lease, None)
        elif isinstance(event, GpuLost):
            self._forget([lease for lease in self.leases.values() if lease.gpu == event.gpu])
        elif isinstance(event, LoadFailed | ModelDemoted):
            for lease in self.leases.values():
                if lease.gpu == event.gpu:
                    lease.models.discard(event.model)
        elif isinstance(event, ModelLoaded):
            self.loads.get(event.gpu, set()).discard(event.model)

    def _known(self) -> tuple[dict[GpuId, NodeId], dict[LeaseId, ActiveLease]]:
        gpus = self.core.cluster.gpus.values()
        return {gpu.spec.id: gpu.spec.node for gpu in gpus}, dict(self.core.leases)

    def _note_snapshot(
        self,
        event: NodeSnapshot,
        nodes: Mapping[GpuId, NodeId],
        known: Mapping[LeaseId, ActiveLease],
    ) -> None:
        """The core took it; these GPUs and leases it had before."""
        here = [gpu for gpu, node in nodes.items() if node == event.node]
        found = {lease.lease for gpu in event.gpus for lease in gpu.leases}
        residents = {gpu.gpu.id: {model for model, _ in gpu.residents} for gpu in event.gpus}
        mine = [lease for lease in self.leases.values() if lease.gpu in here]
        self._forget([lease for lease in mine if lease.id not in found])
        for lease in mine:
            lease.models &= residents.get(lease.gpu, set())
        for snapshot in event.gpus:
            self.loads[snapshot.gpu.id] = set(snapshot.loading)
            stuck = dict(snapshot.stuck)
            self.aside |= {
                lease.id
                for lease in [known[each.id] for each in mine if each.id in self.leases]
                if lease.slot.gpu.spec.id == snapshot.gpu.id
                and not stuck.keys().isdisjoint(lease.models)
            }
            for live in snapshot.leases:
                models = set(live.models) & residents[snapshot.gpu.id]
                adopted = HeldLease(
                    live.lease,
                    live.slot,
                    snapshot.gpu.id,
                    models,
                    self.now,
                    live.requests,
                    more_slots=live.more_slots,
                    configuration=live.configuration,
                )
                self.leases.setdefault(live.lease, adopted)

    def _forget(self, leases: list[HeldLease]) -> None:
        for lease in leases:
            del self.leases[lease.id]

    def _note(self, action: Action) -> None:
        if isinstance(action, Prepare):
            loads = self.loads.setdefault(action.gpu, set())
            loads.update(load.model for load in action.loads)
            if action.beside:
                self.beside.add(action.lease)
        if isinstance(action, Prepare) and action.prefetch:
            models = {load.model for load in action.loads}
            done_s = self.now
            self.leases[action.lease] = HeldLease(
                action.lease, action.slot, action.gpu, models, done_s
            )
        elif isinstance(action, Dispatch) and action.lease not in self.leases:
            models = set(self.sent[action.requests[0]].models)
            done_s = self.now + action.estimate.total_s
            self.leases[action.lease] = HeldLease(
                action.lease,
                action.slot,
                action.gpu,
                models,
                done_s,
                action.requests,
                action.more_slots,
                action.configuration,
            )
        elif isinstance(action, Taken):
            self.sent.setdefault(action.request.id, action.request)
        elif isinstance(action, Recall):
            self.recalled.append(action.lease)
        elif isinstance(action, SetTimer) and isinstance(action.event, StageDue):
            self.stages.append((action.at_s, action.event))
        elif isinstance(action, Finish):
            self.ends.setdefault(action.request, []).append(action.outcome)

    # -- what tests do most -----------------------------------------------------------------------

    def arrive(self, *requests: Request, at: float | None = None) -> list[Action]:
        """Let requests arrive, one after the other, at one time."""
        return [action for each in requests for action in self.send(RequestArrived(each), at)]

    def report(
        self,
        gpu: GpuId,
        loading: Collection[ModelId] | None = None,
        stuck: Mapping[ModelId, float] | None = None,
        at: float | None = None,
    ) -> list[Action]:
        """The node of this GPU, its only one, tells its whole state, as far as the core knows it.

        What is `loading` and for how long each load is `stuck` the core may not know yet.
        """
        known = self.core.cluster.gpus[gpu]
        residents = tuple((each.model, each.bytes) for each in known.cache.residents.values())
        leases = tuple(lease.live for lease in self.leases.values() if lease.gpu == gpu)
        under_way = tuple(known.loads if loading is None else loading)
        stood = tuple((stuck or {}).items())
        found = GpuSnapshot(known.spec, residents, leases, loading=under_way, stuck=stood)
        return self.send(NodeSnapshot(known.spec.node, (found,)), at)

    def lease_on(self, slot: str) -> LeaseId:
        """The oldest lease in force on a slot."""
        return min(lease.id for lease in self.leases.values() if lease.slot == slot)

    def lease_of(self, request: str) -> LeaseId:
        """The latest lease that was given to a request."""
        return max(lease.id for lease in self.leases.values() if request in lease.requests)

    def release(self, slot: str, *, may_return: bool = False) -> list[Action]:
        """The holder of the oldest lease on a slot says that it is done, perhaps for now."""
        return self.send(LeaseReleased(self.lease_on(slot), may_return))

    def free(self, slot: str, at: float | None = None) -> list[Action]:
        """The manager ends the oldest lease on a slot, after its load, if that is beside runs."""
        lease = self.leases[self.lease_on(slot)]
        loaded = sorted(self.loads.get(lease.gpu, set()) & lease.models)
        found: list[Action] = []
        for model in loaded if lease.id in self.beside else ():
            found += self.send(ModelLoaded(lease.gpu, model, 1.0, Tier.ABSENT), at)
        return found + self.send(SlotFreed(SlotId(slot), lease.id), at)


def placements(actions: list[Action]) -> list[tuple[str, str]]:
    """Which request went to which slot, by a lease or to its local queue, in order."""
    found: list[tuple[str, str]] = []
    for action in actions:
        if isinstance(action, Dispatch):
            found += [(request, action.slot) for request in action.requests]
        elif isinstance(action, EnqueueLocally):
            found.append((action.request, f"queue of {action.slot}"))
    return found


def ended(actions: list[Action]) -> dict[str, RequestOutcome]:
    """How the requests that ended with these actions ended."""
    return {each.request: each.outcome for each in actions if isinstance(each, Finish)}


def refused(actions: list[Action]) -> list[str]:
    """The reasons for what was refused."""
    return [each.reason for each in actions if isinstance(each, Refuse)]


def only(kind: type[_Kind], actions: list[Action]) -> _Kind:
    """The one action of this kind among these."""
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found
