"""Leases that outlive their first call, because their callers keep them while nobody else waits."""

from collections import OrderedDict
from operator import attrgetter

from msgspec.structs import replace

from scheduler.cluster.request_queue import Bundle, Pending
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.core.layer import Handler, Layer
from scheduler.core.lifecycle import Lifecycle
from scheduler.model.actions import Dispatch, EndLease, Finish, Recall, SetTimer, Taken
from scheduler.model.errors import BadEvent
from scheduler.model.events import Event, LeaseUsed, RecallPassed
from scheduler.model.values import (
    CoreSettings,
    Estimate,
    LeaseId,
    LeaseUse,
    Request,
    RequestId,
    RequestOutcome,
    StandingTerms,
)

# A caller reports its last calls under a lease a moment after the node has ended the lease, and
# what it could not report for longer than this is left out.
_REPORTED_S = 60.0
_MOST_ENDED = 4_096
_RULE = "its caller kept this lease"
_BEGAN_S = attrgetter("began_s")
# A caller gives a recalled lease back after its call in flight; it is asked again after this time.
_RECALL_S = 0.25
# A lease that no second call used was kept in vain: the next leases of its kind do not stand, one
# at first, twice as many each time, and so many at most.
_MOST_SKIPPED = 64
_MOST_KINDS = 10_000

# What a lease can be kept for: the caller, its function and the models.
_Kind = tuple[str, str, Bundle]
# Leases of one kind that stand while nobody else waits, or for a slice.
_Doubted = tuple[_Kind, bool]


class _Doubt:
    """Whether leases of one kind are worth keeping: how many of the next ones do not stand."""

    def __init__(self) -> None:
        self.skipped = 0
        self.to_skip = 0

    def skips(self) -> bool:
        """Whether the next lease does not stand; each look counts as one lease."""
        if self.to_skip:
            self.to_skip -= 1
            return True
        return False

    def in_vain(self) -> None:
        self.skipped = self.to_skip = min(max(1, 2 * self.skipped), _MOST_SKIPPED)


class StandingLeases(Layer):
    """The leases that stand, and which of them are recalled; `terms`: how they are given.

    Somebody else is a request in the global queue, or in the queue of the lease's slot, that is not
    of the lease's kind: those of its kind are served by their own caller. Requests that wait for
    other slots lose nothing by a lease that stands here.
    """

    def __init__(self, lifecycle: Lifecycle, settings: CoreSettings) -> None:
        self.terms = settings.standing
        self.kept_leases: dict[_Kind, dict[LeaseId, None]] = {}  # both: least recently used first
        self.kinds: dict[LeaseId, _Kind] = {}
        self.recalled: set[LeaseId] = set()
        self.waiting: dict[_Kind, int] = {}
        self.unused: dict[LeaseId, _Doubted] = {}
        self._cluster = lifecycle.cluster
        self._lifecycle = lifecycle
        self._unsaid: list[LeaseId] = []
        # When each ended, and by what it was given: many, of which the oldest leaves.
        self._ended: OrderedDict[LeaseId, tuple[float, Dispatch]] = OrderedDict()
        self._doubts: dict[_Doubted, _Doubt] = {}
        if self.terms is not None:
            lifecycle.switch_on(self)

    def handlers(self) -> dict[type[Event], Handler]:
        return {LeaseUsed: (self._lease_used, False), RecallPassed: (self._recall_passed, False)}

    # -- requests that wait -----------------------------------------------------------------------

    def waits(self, pending: Pending) -> None:
        kind = _kind(pending)
        self.waiting[kind] = self.waiting.get(kind, 0) + 1

    def waits_no_more(self, pending: Pending) -> None:
        kind = _kind(pending)
        self.waiting[kind] -= 1
        if not self.waiting[kind]:
            del self.waiting[kind]

    def _others(self, kind: _Kind) -> int:
        """How many requests wait for any slot that leases of this kind could not serve."""
        return self._cluster.waiting.count - self.waiting.get(kind, 0)

    # -- leases that stand ------------------------------------------------------------------------

    def stands(self, lease: ActiveLease) -> StandingTerms | None:
        """Its caller may keep it, unless leases of its kind were kept in vain."""
        terms, first = self.terms, lease.requests[0]
        if lease.is_shared or lease.beside or lease.more or lease.configuration is not None:
            return None
        if not self._lifecycle.may_be_kept(lease) or terms is None or not first.request.caller:
            return None
        kind = _kind(first)
        if self._others(kind) or any(_kind(o) != kind for o in lease.slot.local.unsorted()):
            if not terms.slice_s:
                return None
            terms = terms._replace(seconds=terms.slice_s)
        doubted = kind, terms.for_a_slice
        doubt = self._doubts.get(doubted)
        if doubt is not None and doubt.skips():
            return None
        self.unused[lease.id] = doubted
        if not terms.for_a_slice:  # else it ends by itself, before a recall would be obeyed
            self.kinds[lease.id] = kind
            self.kept_leases.setdefault(kind, {})[lease.id] = None
        return terms

    def called(self, lease: ActiveLease, use: LeaseUse, began_s: float, ended_s: float) -> None:
        """Others are recalled before this one, and leases of its kind are worth keeping."""
        unused = self.unused.pop(lease.id, None)
        if unused is not None:
            self._doubts.pop(unused, None)
        kind = self.kinds.get(lease.id)
        if kind is not None:
            leases = self.kept_leases.pop(kind)
            leases[lease.id] = leases.pop(lease.id)
            self.kept_leases[kind] = leases

    def given_back(self, lease: ActiveLease, *, tell: bool) -> None:
        self._let_end(lease.id, tell=tell)

    def _let_end(self, lease: LeaseId, *, tell: bool = True) -> None:
        """If it is kept, it stands no longer."""
        kind = self.kinds.pop(lease, None)
        if kind is None:
            return
        leases = self.kept_leases[kind]
        del leases[lease]
        if not leases:
            del self.kept_leases[kind]
        self.recalled.add(lease)
        if tell:
            self._unsaid.append(lease)

    def ended(self, lease: ActiveLease) -> None:
        """A caller that still keeps the lease is told so by a recall."""
        if lease.dispatch is None or lease.dispatch.stands is None:
            return
        self._let_end(lease.id)
        self.recalled.discard(lease.id)
        unused = self.unused.pop(lease.id, None)
        if unused is not None:
            if len(self._doubts) >= _MOST_KINDS:
                self._doubts.clear()
            self._doubts.setdefault(unused, _Doubt()).in_vain()
        self._ended[lease.id] = self._cluster.now, replace(lease.dispatch, explanation=None)
        self._forget_ended()

    def _forget_ended(self) -> None:
        while self._ended:
            ended_s, _ = next(iter(self._ended.values()))
            if len(self._ended) <= _MOST_ENDED and self._cluster.now - ended_s <= _REPORTED_S:
                return
            self._ended.popitem(last=False)

    # -- calls under leases that stand ------------------------------------------------------------

    def _lease_used(self, event: LeaseUsed) -> None:
        """Take one report in: first the ends of earlier calls, then the new calls."""
        cluster = self._cluster
        now, lease = cluster.now, cluster.leases.get(event.lease)
        for end in event.ends:
            self._call_ended(end.request, event.lease, min(end.ended_s, now))
        if event.uses:
            self._count_uses(event, lease)
        if lease is None:
            return
        ended_s = [end.ended_s for end in event.ends]
        ended_s += [use.ended_s for use in event.uses if use.ended_s is not None]
        latest_s = min(max(ended_s, default=lease.called_until_s), now)
        lease.called_until_s = max(lease.called_until_s, latest_s)
        if not lease.requests:
            self._lifecycle.kept(lease, latest_s if ended_s else now)

    def _count_uses(self, event: LeaseUsed, lease: ActiveLease | None) -> None:
        cluster, lifecycle, dispatch = self._cluster, self._lifecycle, self._dispatch_of(event)
        lifecycle.placed(event.function, len(event.uses))
        for use in sorted(event.uses, key=_BEGAN_S):
            if use.request in cluster.requests:
                continue  # another call has this id, and has not ended
            request = _request(event, use, dispatch, cluster.now)
            began_s = min(use.began_s, cluster.now)
            taken = replace(dispatch, requests=(use.request,))
            cluster.out.append(Taken(request, began_s, taken, use.parent))
            number = lifecycle.count(request.models)
            if lease is not None:
                lifecycle.called(lease, use)
            if lease is None or use.ended_s is not None:  # without a lease: its node has ended it
                ended_s = cluster.now if use.ended_s is None else min(use.ended_s, cluster.now)
                cluster.out.append(Finish(use.request, RequestOutcome.COMPLETED, "", ended_s))
            else:
                pending = lifecycle.pending(request, request.arrived_s or 0.0)
                pending.number = number
                cluster.requests[use.request] = pending
                lease.give_to(pending)
                cluster.runs_until(lease, began_s + dispatch.estimate.run_s)
        if lease is not None:
            for layer in lifecycle.hooks["calls_reported"]:
                layer.calls_reported(lease, event.function, dispatch.estimate.run_s)
            if not lifecycle.may_be_kept(lease):
                self._let_end(lease.id)

    def _dispatch_of(self, event: LeaseUsed) -> Dispatch:
        """What each of these calls would have been dispatched by, had it asked."""
        lease = self._cluster.leases.get(event.lease)
        if lease is not None:
            profiles, gpu_type = self._cluster.profiles, lease.slot.gpu.spec.gpu_type
            beside = lease.slot.neighbours(lease)
            run_s = profiles.runs_s(lease.models, event.batch, gpu_type, beside)
            given = replace(lease.dispatch or _adopted(lease), estimate=Estimate(0.0, run_s))
        elif event.lease in self._ended:
            _, given = self._ended[event.lease]
        else:
            raise BadEvent("lease", event.lease)
        return replace(given, hit=True, held_elsewhere=False, rule=_RULE, explanation=None)

    def _call_ended(self, request: RequestId, lease: LeaseId, ended_s: float) -> None:
        """A call has ended whose caller keeps the lease; one that is unknown has ended before."""
        pending = self._cluster.requests.get(request)
        if pending is None:
            return
        held = self._cluster.leases.get(lease)
        if held is not None and pending in held.requests:
            held.requests.remove(pending)
            self._lifecycle.finish(pending, RequestOutcome.COMPLETED, "", ended_s)
        else:  # the lease was lost meanwhile, and the request was to be placed again
            self._lifecycle.withdraw(request, RequestOutcome.COMPLETED, "")

    # -- recalls ----------------------------------------------------------------------------------

    def needed(self, slot: Slot, pending: Pending | None) -> None:
        for lease in slot.leases:
            kind = self.kinds.get(lease)
            if kind is not None and (pending is None or kind != _kind(pending)):
                self._let_end(lease)

    def after_event(self) -> None:
        """Recall one lease for each request that waits and that those that stand cannot serve.

        The least recently used ones are first; more follow once these have ended and requests
        still wait. Their callers have a moment to obey.
        """
        cluster = self._cluster
        if self.kept_leases and cluster.waiting.count:
            for kind in list(self.kept_leases):
                while kind in self.kept_leases and self._others(kind) > len(self.recalled):
                    self._let_end(next(iter(self.kept_leases[kind])))
        unsaid, self._unsaid = self._unsaid, []
        for lease in unsaid:
            cluster.out.append(Recall(lease))
            if lease in cluster.leases:
                slice_s = 0.0 if self.terms is None else self.terms.slice_s
                passed_s = cluster.now + slice_s + _RECALL_S
                cluster.out.append(SetTimer(passed_s, RecallPassed(lease)))

    def _recall_passed(self, event: RecallPassed) -> None:
        """A recalled lease was not given back: its node ends it after the call in flight."""
        lease = self._cluster.leases.get(event.lease)
        if lease is not None and not lease.released:
            end = EndLease(lease.slot.id, lease.id, "it was recalled", recalled=True)
            self._cluster.out.append(end)


def _kind(pending: Pending) -> _Kind:
    request = pending.request
    return request.caller, request.function, pending.bundle


def _adopted(lease: ActiveLease) -> Dispatch:
    """For a lease that an earlier leader gave."""
    slot, spec, none = lease.slot, lease.slot.gpu.spec, Estimate(0.0, 0.0)
    return Dispatch(
        lease.id, slot.id, spec.id, spec.node, (), True, False, none, _RULE, models=lease.models
    )


def _request(event: LeaseUsed, use: LeaseUse, dispatch: Dispatch, now: float) -> Request:
    return Request(
        use.request,
        event.function,
        dispatch.models,
        event.batch,
        arrived_s=max(0.0, min(use.arrived_s, use.began_s, now)),
    )
