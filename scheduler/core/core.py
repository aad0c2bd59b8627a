"""The state machine that decides everything: `handle(event, now) -> actions`, and nothing else.

No clock, no network, no log, no randomness: the same events give the same actions. The live service
and the simulator drive this same object.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from cache_manager import eviction
from cache_manager.eviction.eviction_rule import EvictionRule
from scheduler import policies
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.state import ClusterState
from scheduler.core.fleet import Fleet
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.placer import Placer
from scheduler.features.billing.use_meter import UseMeter
from scheduler.model import events
from scheduler.model.actions import Action, Refuse
from scheduler.model.errors import BadEvent, SchedulerError
from scheduler.model.events import (
    Event,
    LeaseIdsRaised,
    PolicySet,
    SlotFreed,
    TermsSet,
    TimerFired,
)
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import (
    CoreSettings,
    LeaseId,
    RequestId,
)
from scheduler.policies.placement_policy import Policy

# What one kind of event does, and whether the policy runs after it.
_Handler = tuple[Callable[[Any, float, list[Action]], None], bool]


class Core:
    """Requests, GPUs and models in; placements out."""

    def __init__(
        self,
        policy: Policy,
        rule: EvictionRule,
        settings: CoreSettings | None = None,
        *,
        policy_name: str = "",
    ) -> None:
        settings = settings or CoreSettings()
        self.cluster = ClusterState(settings, rule)
        self.placer = Placer(self.cluster, settings, policy, policy_name)
        self.exits = self.placer.exits
        self.lifecycle = Lifecycle(self.cluster, self.placer, settings.max_waiting)
        self.fleet = Fleet(self.cluster, self.placer, self.lifecycle)
        self._forgetting = Forgetting(self.lifecycle.requests, self.placer, settings.most_models)
        self._handlers = self._table()
        self._follow_lead()

    @property
    def requests(self) -> Mapping[RequestId, Pending]:
        """Every request that was accepted and has not ended."""
        return self.lifecycle.requests

    @property
    def terms(self) -> Mapping[str, OwnerTerms]:
        return self.placer.tenancy.owners.terms

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in; the caller carries out the actions in their order."""
        out: list[Action] = []
        tenancy = self.placer.tenancy
        self.cluster.now = now
        handler, decides = self._handlers[type(event)]
        try:
            handler(event, now, out)
        except BadEvent as error:  # for example a late report from a lost GPU
            out.append(Refuse(event, str(error)))
            if self.placer.meter is not None:
                self.placer.meter.look(now)
            return out
        if decides or self.placer.disturbed or tenancy.order.paused.may_be_due(now):
            self.placer.disturbed = False
            if tenancy.on or tenancy.refused:
                self._decide_in_turn(now, out)
            elif self.cluster.waiting.count or self.cluster.has_ready():
                self.placer.decide(now, out)
        if self.placer.standing:
            self.lifecycle.recall(now, out)
        if self.exits.fell_idle or self.exits.came_to_rest:
            self.exits.watch(now, out)
        self._forgetting.forget_when_due()
        if self.placer.meter is not None:
            self.placer.meter.look(now)
        return out

    def start_metering(self, now: float) -> UseMeter:
        assert not self.placer.leases, "leases in force are not known to a new meter"
        meter = self.placer.meter = UseMeter(self.cluster, now)
        return meter

    def _decide_in_turn(self, now: float, out: list[Action]) -> None:
        """Let the policy decide on those whose turn it is, and on others while slots are idle."""
        tenancy, cluster, placer = self.placer.tenancy, self.cluster, self.placer
        tenancy.retry()
        again = True
        while again:
            tenancy.expose()
            if tenancy.refused:
                self.lifecycle.refuse_held_back(out)
            if cluster.waiting.count or cluster.has_ready():
                placer.decide(now, out)
            again = tenancy.has_more() or tenancy.order.resume(now)
            again = again or tenancy.expose_spare(nothing_runs=not placer.leases)
        room_s = tenancy.order.paused.next_s()
        if room_s is not None:
            placer.wake(room_s, now, out)

    # -- events handled by the core itself --------------------------------------------------------

    def _slot_freed(self, event: SlotFreed, now: float, out: list[Action]) -> None:
        self.lifecycle.slot_freed(event, now, out)
        slot = self.cluster.slots.get(event.slot)
        if slot is not None and slot.gpu.draining:
            self.fleet.leave_if_drained(slot.gpu)

    def _policy_set(self, event: PolicySet, now: float, out: list[Action]) -> None:
        try:
            policy = policies.make(event.policy, event.parameters)
        except SchedulerError as error:
            out.append(Refuse(event, str(error)))
            return
        self.placer.policy, self.placer.policy_name = policy, event.policy
        self.cluster.demand.stop()
        self.cluster.loadable.stop()
        for slot in self.cluster.slots.values():
            self.placer.recall(slot)
        self._follow_lead()

    def _follow_lead(self) -> None:
        """What the policy in force says of how far it looks ahead of others' turns."""
        lead_s = policies.lead_s(self.placer.policy)
        requests, leases = self.lifecycle.requests.values(), self.placer.leases.values()
        self.placer.tenancy.set_lead(lead_s, requests, leases)

    def _terms_set(self, event: TermsSet, now: float, out: list[Action]) -> None:
        cluster = self.cluster
        if self.placer.queued > cluster.waiting.count + cluster.held:  # some wait for one slot
            for slot in cluster.slots.values():
                self.placer.recall(slot)
        requests, leases = self.lifecycle.requests.values(), self.placer.leases.values()
        self.placer.tenancy.set_terms(event.owner, event.terms, requests, leases)

    def _lease_ids_raised(self, event: LeaseIdsRaised, now: float, out: list[Action]) -> None:
        self.placer.last_lease = max(self.placer.last_lease, LeaseId(event.first - 1))
        self.placer.handover.ids_raised(event.first)

    def _timer_fired(self, event: TimerFired, now: float, out: list[Action]) -> None:
        """Nothing to do here: the timer is for the policy, which runs after every event."""

    def _table(self) -> dict[type, _Handler]:
        life, fleet = self.lifecycle, self.fleet
        return {
            events.RequestArrived: (life.request_arrived, True),
            events.RequestCancelled: (life.request_cancelled, True),
            events.DeadlinePassed: (life.deadline_passed, True),
            events.LeaseReleased: (life.lease_released, False),
            events.LeaseWanted: (life.lease_wanted, True),
            events.LeaseUsed: (life.lease_used, False),
            events.LeaseComputed: (life.lease_computed, False),
            events.RecallPassed: (life.recall_passed, False),
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
            events.ContextKept: (self.exits.context_kept, True),
            events.StageDue: (self.exits.stage_due, True),
            events.MemoryPressure: (fleet.memory_pressure, True),
            events.PinAsked: (fleet.obey, True),
            events.UnpinAsked: (fleet.obey, True),
            events.PrefetchAsked: (fleet.obey, True),
            events.EvictAsked: (fleet.obey, True),
            events.PolicySet: (self._policy_set, True),
            events.TermsSet: (self._terms_set, True),
            events.LeaseIdsRaised: (self._lease_ids_raised, False),
            events.TimerFired: (self._timer_fired, True),
        }


def make_core(
    policy: str,
    eviction_rule: str = "lru",
    parameters: Mapping[str, float] | None = None,
    settings: CoreSettings | None = None,
) -> Core:
    """A core by the names that a configuration uses."""
    rule = eviction.make(eviction_rule)
    return Core(policies.make(policy, parameters), rule, settings, policy_name=policy)


# Models are forgotten many at a time, once there are this many (1/N) above the bound.
_SLACK_SHARE = 10
# Sets of models that requests named, for each model: they cost little, and nobody needs most.
_BUNDLES_PER_MODEL = 4


class Forgetting:
    """Keeps at most `most_models` profiles, besides those of models that something still needs.

    A model is needed while a node has its weights in any tier, a lease uses it, or a request names
    it. Of the others those that were used most lately stay.
    """

    def __init__(
        self, requests: Mapping[RequestId, Pending], placer: Placer, most_models: int
    ) -> None:
        self._cluster = placer.cluster
        self._requests = requests
        self._leases = placer.leases
        self._exits = placer.exits
        self._most_models = most_models
        self._due_models = most_models + most_models // _SLACK_SHARE
        self._due_bundles = _BUNDLES_PER_MODEL * self._due_models

    def forget_when_due(self) -> None:
        cluster = self._cluster
        if len(cluster.profiles.known()) > self._due_models:
            self._forget_models()
            # Where too many are needed, the next look is due when there are as many more.
            count = max(self._most_models, len(cluster.profiles.known()))
            self._due_models = count + count // _SLACK_SHARE
        elif cluster.bundle_count > self._due_bundles:
            self._forget_bundles()

    def _forget_models(self) -> None:
        self._forget_bundles()
        cluster = self._cluster
        needed = {model for pending in self._requests.values() for model in pending.models}
        needed |= {model for lease in self._leases.values() for model in lease.models}
        profiles = cluster.profiles.known()
        # The latest are spared: their node is about to report where it has their weights.
        oldest = islice(profiles, len(profiles) - self._most_models // _SLACK_SHARE)
        unneeded = (
            model for model in oldest if model not in needed and not cluster.index.has(model)
        )
        for model in list(islice(unneeded, len(profiles) - self._most_models)):
            cluster.profiles.forget(model)
            cluster.index.forget(model)
            self._exits.forget(model)

    def _forget_bundles(self) -> None:
        self._cluster.keep_bundles(
            dict.fromkeys(pending.bundle for pending in self._requests.values())
        )
        self._due_bundles = max(self._due_bundles, 2 * self._cluster.bundle_count)
