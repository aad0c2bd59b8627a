"""Leases that outlive their first call, because their callers keep them while nobody else waits."""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec.structs import replace

from scheduler.cluster.request_queue import Bundle, Pending
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.model.actions import Dispatch
from scheduler.model.values import Estimate, LeaseId, StandingTerms

# A caller reports its last calls under a lease a moment after the node has ended the lease, and
# what it could not report for longer than this is left out.
_REPORTED_S = 60.0
_MOST_ENDED = 4_096
_RULE = "its caller kept this lease"
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


class StandingLeases:
    """The leases that stand, and which of them are recalled; `terms`: how they are given.

    Somebody else is a request in the global queue, or in the queue of the lease's slot, that is not
    of the lease's kind: those of its kind are served by their own caller. Requests that wait for
    other slots lose nothing by a lease that stands here.
    """

    def __init__(self, terms: StandingTerms | None) -> None:
        self.terms = terms
        self.kept: dict[_Kind, dict[LeaseId, ActiveLease]] = {}  # both: least recently used first
        self.kinds: dict[LeaseId, _Kind] = {}
        self.recalled: set[LeaseId] = set()
        self._unsaid: list[LeaseId] = []
        self.waiting: dict[_Kind, int] = {}
        self.queued = 0
        # When each ended, and by what it was given: many, of which the oldest leaves.
        self._ended: OrderedDict[LeaseId, tuple[float, Dispatch]] = OrderedDict()
        self.unused: dict[LeaseId, _Doubted] = {}
        self._doubts: dict[_Doubted, _Doubt] = {}

    def __bool__(self) -> bool:
        """Whether some lease may have to be recalled, or a recall is not said yet."""
        return bool(self.kept or self._unsaid)

    # -- requests that wait -----------------------------------------------------------------------

    def waits(self, pending: Pending) -> None:
        """A request waits in the global queue."""
        if self.terms is not None:
            kind = _kind(pending)
            self.waiting[kind] = self.waiting.get(kind, 0) + 1
            self.queued += 1

    def waits_no_more(self, pending: Pending) -> None:
        if self.terms is not None:
            kind = _kind(pending)
            self.queued -= 1
            self.waiting[kind] -= 1
            if not self.waiting[kind]:
                del self.waiting[kind]

    def _others(self, kind: _Kind) -> int:
        """How many requests wait for any slot that leases of this kind could not serve."""
        return self.queued - self.waiting.get(kind, 0)

    # -- leases that stand ------------------------------------------------------------------------

    def terms_for(self, pending: Pending, slot: Slot) -> StandingTerms | None:
        """The terms on which its caller may keep a lease on this slot; None if it may not."""
        terms = self.terms
        if terms is None or not pending.request.caller:
            return None
        kind = _kind(pending)
        if self._others(kind) or any(_kind(other) != kind for other in slot.local.unsorted()):
            if not terms.slice_s:
                return None
            terms = terms._replace(seconds=terms.slice_s)
        doubt = self._doubts.get((kind, terms.for_a_slice))
        return None if doubt is not None and doubt.skips() else terms

    def given(self, lease: ActiveLease, pending: Pending) -> None:
        """A lease was given that may outlive the call of this request."""
        assert lease.dispatch is not None
        assert lease.dispatch.stands is not None
        kind = _kind(pending)
        for_a_slice = lease.dispatch.stands.for_a_slice
        self.unused[lease.id] = kind, for_a_slice
        if not for_a_slice:  # else it ends by itself, before a recall would be obeyed
            self.kinds[lease.id] = kind
            self.kept.setdefault(kind, {})[lease.id] = lease

    def used(self, lease: ActiveLease) -> None:
        """A call ran under this lease: others are recalled before it."""
        unused = self.unused.pop(lease.id, None)
        if unused is not None:
            self._doubts.pop(unused, None)
        kind = self.kinds.get(lease.id)
        if kind is not None:
            leases = self.kept.pop(kind)
            leases[lease.id] = leases.pop(lease.id)
            self.kept[kind] = leases

    def given_back(self, lease: LeaseId, *, tell: bool) -> None:
        """It ends soon; `tell` its caller, unless the caller itself gave it back."""
        if self._drop(lease):
            self.recalled.add(lease)
            if tell:
                self._unsaid.append(lease)

    def ended(self, lease: ActiveLease, now: float) -> None:
        """The lease is over; a caller that still keeps it is told so by a recall."""
        if lease.dispatch is None or lease.dispatch.stands is None:
            return
        self.given_back(lease.id, tell=True)
        self.recalled.discard(lease.id)
        unused = self.unused.pop(lease.id, None)
        if unused is not None:
            self._doubt(unused)
        self._ended[lease.id] = now, replace(lease.dispatch, explanation=None)
        self._forget_ended(now)

    def _forget_ended(self, now: float) -> None:
        while self._ended:
            ended_s, _ = next(iter(self._ended.values()))
            if len(self._ended) <= _MOST_ENDED and now - ended_s <= _REPORTED_S:
                return
            self._ended.popitem(last=False)

    def dispatch_of(self, number: LeaseId, lease: ActiveLease | None) -> Dispatch | None:
        """What the calls under this lease have for a dispatch; None for a lease unknown here."""
        if lease is not None:
            given = lease.dispatch or _adopted(lease)
        elif number in self._ended:
            _, given = self._ended[number]
        else:
            return None
        return replace(given, hit=True, held_elsewhere=False, rule=_RULE, explanation=None)

    # -- recalls ----------------------------------------------------------------------------------

    def recall(self, slot: Slot, waiting: Pending | None = None) -> None:
        """Recall this slot's leases: it takes no further request, or this one waits for it."""
        for lease in slot.leases:
            kind = self.kinds.get(lease)
            if kind is not None and (waiting is None or kind != _kind(waiting)):
                self.given_back(lease, tell=True)

    def recalls(self) -> Iterator[LeaseId]:
        """The leases to recall now: one for each request that waits and that they cannot serve.

        The least recently used ones are first; more follow once these have ended and requests
        still wait.
        """
        if self.queued:
            for kind in list(self.kept):
                while kind in self.kept and self._others(kind) > len(self.recalled):
                    self.given_back(next(iter(self.kept[kind])), tell=True)
        unsaid, self._unsaid = self._unsaid, []
        return iter(unsaid)

    def _doubt(self, unused: _Doubted) -> None:
        if len(self._doubts) >= _MOST_KINDS:
            self._doubts.clear()
        self._doubts.setdefault(unused, _Doubt()).in_vain()

    def _drop(self, lease: LeaseId) -> bool:
        """Return whether the lease was kept."""
        kind = self.kinds.pop(lease, None)
        if kind is None:
            return False
        leases = self.kept[kind]
        del leases[lease]
        if not leases:
            del self.kept[kind]
        return True


def _kind(pending: Pending) -> _Kind:
    request = pending.request
    return request.caller, request.function, pending.bundle


def _adopted(lease: ActiveLease) -> Dispatch:
    """For a lease that an earlier leader gave."""
    slot, spec = lease.slot, lease.slot.gpu.spec
    return Dispatch(
        lease=lease.id,
        slot=slot.id,
        gpu=spec.id,
        node=spec.node,
        requests=(),
        hit=True,
        held_elsewhere=False,
        estimate=Estimate(0.0, 0.0),
        rule=_RULE,
        models=lease.models,
    )
