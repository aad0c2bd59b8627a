"""The state machine that decides everything: `handle(event, now) -> actions`, and nothing else.

No clock, no network, no log, no randomness: the same events give the same actions. The live service
and the simulator drive this same object.
"""

from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

from cache_manager.eviction.eviction_rule import EvictionRule
from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler import policies
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import ActiveLease
from scheduler.cluster.state import ClusterState
from scheduler.core.fleet import Fleet
from scheduler.core.layer import Handler, Layer
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.placer import Placer
from scheduler.model import events
from scheduler.model.actions import Action, Refuse
from scheduler.model.errors import BadEvent, SchedulerError
from scheduler.model.events import Event
from scheduler.model.values import CoreSettings, LeaseId, RequestId
from scheduler.policies.placement_policy import Policy

_Layer = TypeVar("_Layer", bound=Layer)


def _unhandled(event: Event) -> None:
    """Callers and nodes may send what belongs to a feature that this core does without."""
    raise BadEvent("feature that takes", type(event).__name__)


_UNHANDLED: Handler = _unhandled, False


class Core:
    """Requests, GPUs and models in; placements out."""

    def __init__(
        self,
        policy: Policy,
        rule: EvictionRule,
        settings: CoreSettings,
        *,
        policy_name: str = "",
    ) -> None:
        self.cluster = ClusterState(settings, rule)
        self.lifecycle = Lifecycle(self.cluster, settings)
        self.placer = Placer(self.lifecycle, settings, policy, policy_name)
        self.fleet = Fleet(self.lifecycle, self.placer)
        self._layers: list[Layer] = []
        self._forgetting = Forgetting(self.lifecycle, settings.most_models)
        self._handlers = self._table()

    def add(self, layer: _Layer) -> _Layer:
        """Let a feature take part, before anything happens that it should know of."""
        self._layers.append(layer)
        self._handlers.update(layer.handlers())
        layer.policy_set(self.placer.policy)
        return layer

    def layer(self, kind: type[_Layer]) -> _Layer:
        """The layer of this kind, which must be there."""
        return next(layer for layer in self._layers if isinstance(layer, kind))

    @property
    def requests(self) -> Mapping[RequestId, Pending]:
        """Every request that was accepted and has not ended."""
        return self.cluster.requests

    @property
    def leases(self) -> Mapping[LeaseId, ActiveLease]:
        """Every lease in force."""
        return self.cluster.leases

    def leaves_s(self, node: NodeId, gpu: GpuId | None, model: ModelId) -> float | None:
        """When an idle model may leave this GPU, or without one the node's store; None: never."""
        times = [layer.leaves_s(node, gpu, model) for layer in self.lifecycle.hooks["leaves_s"]]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in; the caller carries out the actions in their order."""
        cluster = self.cluster
        cluster.now, cluster.out = now, []
        handler, decides = self._handlers.get(type(event), _UNHANDLED)
        try:
            handler(event)
        except BadEvent as error:  # for example a late report from a lost GPU
            cluster.out.append(Refuse(event, str(error)))
        else:
            if decides or cluster.disturbed or self._is_due():
                cluster.disturbed = False
                self._decide()
            self._forgetting.forget_when_due()
        for layer in self.lifecycle.hooks["after_event"]:
            layer.after_event()
        return cluster.out

    def _is_due(self) -> bool:
        return any(layer.is_due() for layer in self.lifecycle.hooks["is_due"])

    def _decide(self) -> None:
        """Let the policy decide, and again while layers let it see more requests."""
        cluster, hooks = self.cluster, self.lifecycle.hooks
        for layer in hooks["expose"]:
            layer.expose()
        again = True
        while again:
            if cluster.waiting.count or cluster.has_ready():
                self.placer.decide()
            again = False
            for layer in hooks["expose_more"]:
                again |= layer.expose_more()

    # -- events handled by the core itself --------------------------------------------------------

    def _slot_freed(self, event: events.SlotFreed) -> None:
        self.lifecycle.slot_freed(event)
        slot = self.cluster.slots.get(event.slot)
        if slot is not None and slot.gpu.draining:
            self.fleet.leave_if_drained(slot.gpu)

    def _policy_set(self, event: events.PolicySet) -> None:
        try:
            policy = policies.make(event.policy, event.parameters)
        except SchedulerError as error:
            self.cluster.out.append(Refuse(event, str(error)))
            return
        self.placer.policy, self.placer.policy_name = policy, event.policy
        self.cluster.demand = self.cluster.loadable = None
        for slot in self.cluster.slots.values():
            self.lifecycle.recall(slot)
        for layer in self._layers:
            layer.policy_set(policy)

    def _lease_ids_raised(self, event: events.LeaseIdsRaised) -> None:
        self.cluster.last_lease = max(self.cluster.last_lease, LeaseId(event.first - 1))
        self.lifecycle.handover.ids_raised(event.first)

    def _timer_fired(self, event: events.TimerFired) -> None:
        """Nothing to do here: the timer is for the policy, which runs after every event."""

    def _table(self) -> dict[type[Event], Handler]:
        life, fleet = self.lifecycle, self.fleet
        return {
            events.RequestArrived: (life.request_arrived, True),
            events.RequestCancelled: (life.request_cancelled, True),
            events.DeadlinePassed: (life.deadline_passed, True),
            events.LeaseReleased: (life.lease_released, False),
            events.LeaseWanted: (life.lease_wanted, True),
            events.LeaseComputed: (life.lease_computed, False),
            events.SlotFreed: (self._slot_freed, True),
            events.RunFinished: (fleet.run_finished, False),
            events.RunFailed: (life.run_failed, True),
            events.GpuJoined: (fleet.join, True),
            events.GpuDraining: (fleet.drain, True),
            events.GpuLost: (fleet.lose, True),
            events.NodeSilent: (fleet.suspend, True),
            events.NodeHeard: (fleet.resume, True),
            events.NodeSnapshot: (fleet.reconcile, True),
            events.ModelRegistered: (fleet.model_registered, True),
            events.ModelLoaded: (fleet.model_loaded, False),
            events.LoadFailed: (fleet.load_failed, True),
            events.ModelDemoted: (fleet.model_demoted, True),
            events.MemoryPressure: (fleet.memory_pressure, True),
            events.PinAsked: (fleet.obey, True),
            events.UnpinAsked: (fleet.obey, True),
            events.PrefetchAsked: (fleet.obey, True),
            events.EvictAsked: (fleet.obey, True),
            events.PolicySet: (self._policy_set, True),
            events.LeaseIdsRaised: (self._lease_ids_raised, False),
            events.TimerFired: (self._timer_fired, True),
        }


# Models are forgotten many at a time, once there are this many (1/N) above the bound.
_SLACK_SHARE = 10
# Sets of models that requests named, for each model: they cost little, and nobody needs most.
_BUNDLES_PER_MODEL = 4


class Forgetting:
    """Keeps at most `most_models` profiles, besides those of models that something still needs.

    A model is needed while a node has its weights in any tier, a lease uses it, or a request names
    it. Of the others those that were used most lately stay.
    """

    def __init__(self, lifecycle: Lifecycle, most_models: int) -> None:
        self._cluster = lifecycle.cluster
        self._hooks = lifecycle.hooks
        self._most_models = most_models
        self._due_models = most_models + most_models // _SLACK_SHARE
        self._due_bundles = _BUNDLES_PER_MODEL * self._due_models

    def forget_when_due(self) -> None:
        cluster = self._cluster
        if len(cluster.profiles.known) > self._due_models:
            self._forget_models()
            # Where too many are needed, the next look is due when there are as many more.
            count = max(self._most_models, len(cluster.profiles.known))
            self._due_models = count + count // _SLACK_SHARE
        elif len(cluster.bundles) > self._due_bundles:
            self._forget_bundles()

    def _forget_models(self) -> None:
        self._forget_bundles()
        cluster = self._cluster
        needed = {model for pending in self._cluster.requests.values() for model in pending.models}
        needed |= {model for lease in cluster.leases.values() for model in lease.models}
        profiles = cluster.profiles.known
        # The latest are spared: their node is about to report where it has their weights.
        oldest = islice(profiles, len(profiles) - self._most_models // _SLACK_SHARE)
        unneeded = (
            model for model in oldest if model not in needed and not cluster.index.has(model)
        )
        for model in list(islice(unneeded, len(profiles) - self._most_models)):
            cluster.profiles.forget(model)
            cluster.index.forget(model)
            for layer in self._hooks["forgotten"]:
                layer.forgotten(model)

    def _forget_bundles(self) -> None:
        cluster = self._cluster
        cluster.keep_bundles(dict.fromkeys(p.bundle for p in cluster.requests.values()))
        self._due_bundles = max(self._due_bundles, 2 * len(cluster.bundles))
