"""The state machine that decides everything: `handle(event, now) -> actions`, and nothing else.

No clock, no network, no log, no randomness: the same events give the same actions. The live service
and the simulator drive this same object.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from cache_manager import eviction
from cache_manager.eviction.eviction_rule import EvictionRule
from cache_manager.residency.gpu_cache import IndexChanges
from scheduler import policies
from scheduler.core import cluster_state
from scheduler.core.admin import AdminHandler
from scheduler.core.billing.use_meter import UseMeter
from scheduler.core.cluster_state import ClusterState
from scheduler.core.cluster_view import ClusterView
from scheduler.core.fleet import Fleet, ModelReports
from scheduler.core.idle_models import IdleModels
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.placer import Placer
from scheduler.core.request_queue import Pending, Visits
from scheduler.core.slots import ActiveLease
from scheduler.core.staged_exit import StagedExit
from scheduler.estimates import estimate
from scheduler.estimates.profiles import Profiles
from scheduler.model import events
from scheduler.model.actions import Action, Dispatch, Finish, Refuse, Taken
from scheduler.model.errors import BadEvent, SchedulerError
from scheduler.model.events import (
    Event,
    LeaseComputed,
    LeaseIdsRaised,
    LeaseUsed,
    MemoryPressure,
    PolicySet,
    SlotFreed,
    TermsSet,
    TimerFired,
)
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import (
    CoreSettings,
    Estimate,
    LeaseId,
    LeaseUse,
    Request,
    RequestId,
    RequestOutcome,
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
        self.cluster = ClusterState(Profiles(settings), rule)
        self.cluster.largest_bytes = settings.largest_gpu_bytes
        self.cluster.index.spares_waiting = settings.spares_waiting
        self.visits = Visits()
        self._view = ClusterView(self.cluster, self.visits)
        self.placer = Placer(self.cluster, self.visits, self._view, settings)
        self._obey(policy, policy_name)
        self.exits = StagedExit(self.cluster, self.placer)
        self.lifecycle = Lifecycle(self.cluster, self.placer, settings.max_waiting)
        self._admin = AdminHandler(self.cluster, self.placer)
        self.fleet = Fleet(self.cluster, self.placer, self.lifecycle, self._admin)
        self._forgetting = Forgetting(
            self.cluster,
            self.lifecycle.requests,
            self.placer.leases,
            self.placer.idle,
            settings.most_models,
        )
        self._handlers = self._table()
        self._changes: IndexChanges | None = None
        self._follow_lead()

    @property
    def requests(self) -> Mapping[RequestId, Pending]:
        """Every request that was accepted and has not ended."""
        return self.lifecycle.requests

    @property
    def terms(self) -> Mapping[str, OwnerTerms]:
        return self.placer.tenancy.terms

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in; the caller carries out the actions in their order."""
        out: list[Action] = []
        tenancy = self.placer.tenancy
        tenancy.now = self.cluster.now = now
        handler, decides = self._handlers[type(event)]
        try:
            handler(event, now, out)
        except BadEvent as error:  # for example a late report from a lost GPU
            out.append(Refuse(event, str(error)))
            self._look(now)
            return out
        if decides or self.placer.disturbed or tenancy.order.paused.may_be_due(now):
            self.placer.disturbed = False
            if tenancy.on or tenancy.refused:
                self._decide_in_turn(now, out)
            elif self.cluster.waiting.count or self.cluster.has_ready():
                self._decide(now, out)
        if self.placer.standing:
            self.lifecycle.recall(now, out)
        if self.placer.idle.fell_idle or self.placer.idle.came_to_rest:
            self.exits.watch(now, out)
        self._forgetting.forget_when_due()
        if self._changes is not None and (self._changes.gpus or self._changes.stored):
            self._look(now)
        return out

    def start_metering(self, now: float) -> UseMeter:
        assert not self.placer.leases, "leases in force are not known to a new meter"
        meter = self.placer.meter = UseMeter(self.cluster, now)
        self._changes = meter.changes
        return meter

    def _look(self, now: float) -> None:
        if self.placer.meter is not None:
            self.placer.meter.look(now)

    def _obey(self, policy: Policy, name: str) -> None:
        self._policy = policy
        self.placer.policy_name = name
        self.placer.reasons.obey(policy, name)

    def _decide(self, now: float, out: list[Action]) -> None:
        requests = self.lifecycle.requests
        self._view.now = now
        for decision in self._policy.decide(self._view):
            self.placer.apply(decision, requests, now, out)

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
                self._decide(now, out)
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

    def _memory_pressure(self, event: MemoryPressure, now: float, out: list[Action]) -> None:
        gpu = self.fleet.gpu(event.gpu)
        self._admin.relieve(gpu, event.short_bytes, event.withheld_bytes, now, out)

    def _policy_set(self, event: PolicySet, now: float, out: list[Action]) -> None:
        try:
            policy = policies.make(event.policy, event.parameters)
        except SchedulerError as error:
            out.append(Refuse(event, str(error)))
            return
        self._obey(policy, event.policy)
        self.cluster.demand.stop()
        self.cluster.loadable.stop()
        for slot in self.cluster.slots.values():
            self.placer.recall(slot)
        self._follow_lead()

    def _follow_lead(self) -> None:
        """What the policy in force says of how far it looks ahead of others' turns."""
        lead_s = policies.lead_s(self._policy)
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
        life, fleet, admin = self.lifecycle, self.fleet, self._admin
        reports = ModelReports(self.cluster, self.placer, life, fleet, admin)
        uses = LeaseUses(self.cluster, self.placer, life)
        return {
            events.RequestArrived: (life.request_arrived, True),
            events.RequestCancelled: (life.request_cancelled, True),
            events.DeadlinePassed: (life.deadline_passed, True),
            events.LeaseReleased: (life.lease_released, False),
            events.LeaseWanted: (life.lease_wanted, True),
            events.LeaseUsed: (uses.used, False),
            events.LeaseComputed: (uses.computed, False),
            events.RecallPassed: (life.recall_passed, False),
            events.SlotFreed: (self._slot_freed, True),
            events.RunFinished: (reports.run_finished, False),
            events.RunFailed: (life.run_failed, True),
            events.GpuJoined: (fleet.join, True),
            events.GpuDraining: (fleet.drain, True),
            events.GpuLost: (fleet.lose, True),
            events.NodeSilent: (fleet.suspend, True),
            events.NodeHeard: (fleet.resume, True),
            events.NodeSnapshot: (fleet.reconcile, True),
            events.ModelRegistered: (reports.model_registered, True),
            events.ModelLoaded: (reports.model_loaded, False),
            events.LoadFailed: (reports.load_failed, True),
            events.ModelDemoted: (reports.model_demoted, True),
            events.ContextKept: (self.exits.context_kept, True),
            events.StageDue: (self.exits.stage_due, True),
            events.MemoryPressure: (self._memory_pressure, True),
            events.PinAsked: (admin.obey, True),
            events.UnpinAsked: (admin.obey, True),
            events.PrefetchAsked: (admin.obey, True),
            events.EvictAsked: (admin.obey, True),
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
        self,
        cluster: ClusterState,
        requests: Mapping[RequestId, Pending],
        leases: Mapping[LeaseId, ActiveLease],
        idle: IdleModels,
        most_models: int,
    ) -> None:
        self._cluster = cluster
        self._requests = requests
        self._leases = leases
        self._idle = idle
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
            self._idle.forget(model)

    def _forget_bundles(self) -> None:
        self._cluster.keep_bundles(
            dict.fromkeys(pending.bundle for pending in self._requests.values())
        )
        self._due_bundles = max(self._due_bundles, 2 * self._cluster.bundle_count)


_BEGAN_S = attrgetter("began_s")


class LeaseUses:
    """Counts reported calls as uses of models and slots, and follows those that still run."""

    def __init__(self, cluster: ClusterState, placer: Placer, lifecycle: Lifecycle) -> None:
        self._cluster = cluster
        self._placer = placer
        self._lifecycle = lifecycle

    def used(self, event: LeaseUsed, now: float, out: list[Action]) -> None:
        """Take one report in: first the ends of earlier calls, then the new calls."""
        lease = self._placer.leases.get(event.lease)
        for end in event.ends:
            self._lifecycle.call_ended(end.request, event.lease, min(end.ended_s, now), out)
        if event.uses:
            self._count(event, lease, now, out)
        if lease is None:
            return
        ended_s = [end.ended_s for end in event.ends]
        ended_s += [use.ended_s for use in event.uses if use.ended_s is not None]
        latest_s = min(max(ended_s, default=lease.called_until_s), now)
        lease.called_until_s = max(lease.called_until_s, latest_s)
        if not lease.requests:
            self._placer.kept(lease, latest_s if ended_s else now, now)

    def computed(self, event: LeaseComputed, now: float, out: list[Action]) -> None:
        """Take a node's report of a function's own process in."""
        del out
        lease = self._placer.leases.get(event.lease)
        if lease is not None and lease.own:
            self._placer.computed(lease, event.computed_s, now)

    def _count(
        self, event: LeaseUsed, lease: ActiveLease | None, now: float, out: list[Action]
    ) -> None:
        dispatch = self._dispatch(event, lease)
        self._placer.count_placed(event.function, len(event.uses), now)
        for use in sorted(event.uses, key=_BEGAN_S):
            if use.request in self._lifecycle.requests:
                continue  # another call has this id, and has not ended
            request = _request(event, use, dispatch, now)
            began_s = min(use.began_s, now)
            taken = replace(dispatch, requests=(use.request,))
            out.append(Taken(request, began_s, taken, use.parent))
            paused = self._placer.tenancy.order.paused.count
            number = self._cluster.accept(request.models, now) - paused
            if lease is not None:
                self._placer.called(lease, use, now)
            if lease is None or use.ended_s is not None:  # without a lease: its node has ended it
                ended_s = now if use.ended_s is None else min(use.ended_s, now)
                out.append(Finish(use.request, RequestOutcome.COMPLETED, "", ended_s))
            else:
                self._lifecycle.call_runs(request, number, lease)
                cluster_state.runs_until(
                    self._cluster, lease, began_s + dispatch.estimate.run_s, now
                )
        tenancy = self._placer.tenancy
        if tenancy.on and lease is not None:
            tenancy.named(lease, event.function, dispatch.estimate.run_s)
            if tenancy.yields(lease.id):
                self._placer.standing.given_back(lease.id, tell=True)

    def _dispatch(self, event: LeaseUsed, lease: ActiveLease | None) -> Dispatch:
        """What each of these calls would have been dispatched by, had it asked."""
        dispatch = self._placer.standing.dispatch_of(event.lease, lease)
        if dispatch is None:
            raise BadEvent("lease", event.lease)
        if lease is None:
            return dispatch
        profiles, gpu_type = self._cluster.profiles, lease.slot.gpu.spec.gpu_type
        beside = lease.slot.neighbours(lease)
        run_s = estimate.run_s(profiles, lease.models, event.batch, gpu_type, beside)
        return replace(dispatch, estimate=Estimate(0.0, run_s))


def _request(event: LeaseUsed, use: LeaseUse, dispatch: Dispatch, now: float) -> Request:
    return Request(
        use.request,
        event.function,
        dispatch.models,
        event.batch,
        arrived_s=max(0.0, min(use.arrived_s, use.began_s, now)),
    )
