"""Namespaces and functions that share the cluster: weights, priorities, and quotas; off by default.

A layer under every policy: policies see only the requests whose turn it is, and keep their
locality, batches and costs. It is on while a policy has a `lead_s` or any owner has terms.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Bundle, Pending, Standing
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.state import ClusterState
from scheduler.features.standing_leases import StandingLeases
from scheduler.features.tenants.owners import (
    FunctionOwner,
    OwnerTable,
    QuotaRefusal,
    Turn,
    both,
    has_room,
    is_over_gpu_s,
    make_room,
    note_named,
    owners_of,
    refusal,
    too_many_bytes,
    with_quota,
)
from scheduler.features.tenants.turn_order import TurnOrder, head_start_s
from scheduler.model.actions import Action
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import LeaseId, Request, RequestId, RequestOutcome

# While slots are idle the policy may choose among so many requests for each, if that many wait.
# With more of them it would use idle slots better, and delay namespaces more that come meanwhile.
_CHOICE = 4
_MOST_AT_ONCE = 64
# How many functions that lacked room in their quota are looked at again after an event.
_MOST_RETRIED = 8


class Tenancy:
    """Follows every request and lease of every owner, while it is on."""

    def __init__(self, cluster: ClusterState, standing: StandingLeases) -> None:
        self.on = False
        self.owners = OwnerTable()
        self.order = TurnOrder(cluster, self.owners)
        self.charges: dict[LeaseId, LeaseCharge] = {}  # leases in force of known functions
        self.refused: list[tuple[Pending, RequestOutcome, str]] = []
        self._cluster = cluster
        self._standing = standing
        self._diverted = False

    @property
    def takes_turns(self) -> bool:
        """Whether namespaces share the GPUs by their weights."""
        return self.order.lead_s > 0.0

    # -- on and off -----------------------------------------------------------------------------

    def set_terms(
        self,
        name: str,
        terms: OwnerTerms | None,
        requests: Iterable[Pending],
        leases: Iterable[ActiveLease],
    ) -> None:
        self.owners.set_terms(name, terms, self._cluster.now)
        self.order.paused.terms_changed()
        if "/" not in name:
            self._share_memory()
        self._switch(requests, leases)
        for owner in list(self.order.stuck):
            self._free(owner)
        concerned = self.owners.functions_of(name)
        if not self.on or not concerned:
            return
        for pending in list(self._cluster.waiting):
            turn = self.order.turns[pending.id]
            if turn.owner in concerned:
                self._pull_back(turn)
        for turn in self.order.turns.values():
            if turn.owner.name == name:
                note_named(turn.owner, turn.pending.models, self._cluster)
        for owner in concerned:
            for turn in list(owner.paused_turns):
                self._refuse_without_time(turn)
            self.order.list(owner)

    def set_lead(
        self, lead_s: float, requests: Iterable[Pending], leases: Iterable[ActiveLease]
    ) -> None:
        """From now on policies see requests whose turn is so much later than the first turn.

        All requests that wait are sorted anew; none waits for one slot.
        """
        order = self.order
        if lead_s == order.lead_s:
            return
        order.lead_s = lead_s
        self._share_memory()
        if not self.on:
            self._switch(requests, leases)
        for pending in list(self._cluster.waiting):
            self._pull_back(order.turns[pending.id])
        for turn in [turn for turn in order.turns.values() if turn.place]:
            turn.note_held(self._cluster.now)
            order.let_go(turn)
            order.hold(turn, self._cluster.now)
        self._cluster.visits.clear()
        self._cluster.latest_seq = 0
        self._switch(requests, leases)

    def _share_memory(self) -> None:
        """Where namespaces take turns they also have parts of the memory, by their weights."""
        weights = {
            name: terms.weight for name, terms in self.owners.terms.items() if "/" not in name
        }
        self._cluster.index.parts.share(weights if self.takes_turns else None)

    def _switch(self, requests: Iterable[Pending], leases: Iterable[ActiveLease]) -> None:
        """Begin to follow everything there is, or stop."""
        on = self.takes_turns or bool(self.owners.terms)
        if on == self.on:
            return
        self.on = on
        if on:
            for pending in requests:
                if pending.standing in (Standing.WAITING, Standing.LOCAL):
                    self._queue(self._turn(pending))
                    self._show(self.order.turns[pending.id])
            for lease in leases:
                if lease.requests:
                    self.granted(lease, lease.requests, max(0.0, lease.due_s - self._cluster.now))
            return
        for owner in list(self.order.stuck):
            self._free(owner)
        held = [turn for turn in self.order.turns.values() if turn.place]
        for turn in sorted(held, key=attrgetter("arrival")):
            self._expose(turn)
        for turn in self.order.turns.values():
            turn.pending.seq = turn.arrival
        self.order.turns.clear()
        self.order.paused.clear()
        self.charges.clear()
        self.owners.clear()

    def _pull_back(self, turn: Turn) -> None:
        """Hold back a request that waits in the global queue."""
        self._standing.waits_no_more(turn.pending)
        self._cluster.waits_no_more(turn.pending)
        self._withdraw(turn)
        turn.pending.seq = turn.arrival
        turn.pauses = self.order.has_no_time(turn.pending, self._cluster.now)
        self._hold(turn)

    # -- requests -------------------------------------------------------------------------------

    def refusal(self, request: Request, bundle: Bundle) -> QuotaRefusal | None:
        self.owners.forget_when_due(self.order.virtual_s)
        owner, expected_s = self.owners.of(request.function), self.order.estimate_s(bundle)
        return refusal(owner, bundle, expected_s, self._cluster.now, goes_on=request.goes_on)

    def hold(self, pending: Pending) -> None:
        """Hold a request back that is to wait for any slot, until its turn."""
        turn = self._turn(pending)
        turn.pauses = self.order.is_to_pause(pending, self._cluster.now)
        self._queue(turn)
        note_named(turn.owner, pending.models, self._cluster)
        self._hold(turn)

    def let_go(self, pending: Pending) -> None:
        """A request that is held back leaves; one that was refused has left already."""
        turn = self.order.turns.get(pending.id)
        if turn is not None and turn.place:
            self.order.let_go(turn)

    def divert(self, pending: Pending, *, stuck: bool) -> None:
        """A request waits for room in a quota: in that of resident bytes if it is `stuck`."""
        turn = self.order.turns[pending.id]
        self._withdraw(turn)
        turn.pauses = self.order.has_no_time(pending, self._cluster.now)
        if stuck:
            turn.owner.stuck = True
            self.order.stuck[turn.owner] = None
        self._diverted = True
        self._hold(turn)

    def finished(self, request: RequestId) -> None:
        turn = self.order.turns.pop(request, None)
        if turn is not None and turn.queued:
            self._unqueue(turn)
            self.owners.forget_when_due(self.order.virtual_s)

    # -- turns ----------------------------------------------------------------------------------

    def expose(self) -> None:
        """Let the policy see all whose turn it is."""
        self._diverted = False
        while (turn := self.order.next()) is not None:
            self._expose(turn)

    def has_more(self) -> bool:
        """Whether the policy should decide once more: others have their turn by what it decided."""
        return self._diverted or self.order.next() is not None

    def expose_spare(self, *, nothing_runs: bool) -> bool:
        """Let it see one more while slots are idle: others use what an owner leaves.

        If it has enough to choose from, takes nothing, and nothing runs, it sees many more at once:
        no later event may come, and what waits may need a GPU that is away.
        """
        cluster, order = self._cluster, self.order
        room = cluster.idle_slots
        if not room and cluster.loadable.running and cluster.loadable.has_any():
            room = 1
        if not order.held or not room:
            return False
        enough = cluster.waiting.count >= _CHOICE * room
        if enough and not nothing_runs:
            return False
        exposed = False
        for _ in range(_MOST_AT_ONCE if enough else 1):
            turn = order.next(spare=True)
            if turn is None:
                break
            self._expose(turn)
            exposed = True
        return exposed

    def retry(self) -> None:
        """Look whether what lacked room in a quota, of resident bytes or GPU time, has it now."""
        self.order.resume(self._cluster.now)
        for owner in list(self.order.stuck)[:_MOST_RETRIED]:
            first = owner.first()
            if first is None or has_room(owner, first.pending.bundle, self._cluster):
                self._free(owner)
            else:  # others are looked at next time
                self.order.stuck[owner] = self.order.stuck.pop(owner)

    def _free(self, owner: FunctionOwner) -> None:
        del self.order.stuck[owner]
        owner.stuck = False
        self.order.list(owner)

    def _expose(self, turn: Turn) -> None:
        """Let the policy see a request, unless it has grown too large while it was held back."""
        pending, cluster = turn.pending, self._cluster
        turn.note_held(self._cluster.now)
        if cluster.too_large(pending.bundle):
            reason = "its models have grown, and no GPU is so large"
            self._refuse(turn, RequestOutcome.TOO_LARGE, reason)
            return
        over = too_many_bytes(turn.owner, pending.bundle)
        if over is not None:
            self._refuse(turn, RequestOutcome.OVER_QUOTA, over.reason)
            return
        self.order.take(turn)
        cluster.latest_seq = max(cluster.latest_seq, pending.seq)
        pending.standing = Standing.WAITING
        self._standing.waits(pending)
        cluster.wait(pending)

    def _hold(self, turn: Turn) -> None:
        self.order.hold(turn, self._cluster.now)
        if turn.pauses:
            self._refuse_without_time(turn)

    def _refuse_without_time(self, turn: Turn) -> None:
        """End a paused call for which there will never be room."""
        for owner in both(turn.owner):
            if owner.terms.gpu_s == 0.0:
                reason = QuotaRefusal(owner, "gpu_s", "no GPU time at all", None).reason
                self._refuse(turn, RequestOutcome.OVER_QUOTA, reason)
                return

    def _refuse(self, turn: Turn, outcome: RequestOutcome, reason: str) -> None:
        self.order.let_go(turn)
        self.refused.append((turn.pending, outcome, reason))

    # -- leases ---------------------------------------------------------------------------------

    def granted(self, lease: ActiveLease, chosen: Sequence[Pending], expected_s: float) -> None:
        owners = []
        for pending in chosen:
            turn = self._turn(pending)
            if turn.queued:
                self._unqueue(turn)
            owners.append(turn.owner)
        self._charge(lease, owners, expected_s)
        if lease.own and not lease.loading:
            self.rests(lease, self._cluster.now)

    def _charge(self, lease: ActiveLease, owners: list[FunctionOwner], expected_s: float) -> None:
        """Charge these owners in equal parts, perhaps with others that had the lease already."""
        now, earlier = self._cluster.now, self.charges.get(lease.id)
        if earlier is not None:
            owners = [*earlier.owners, *owners]
            self.ended(lease)
        share = (1 + len(lease.more)) / len(owners)
        charge = self.charges[lease.id] = LeaseCharge(owners, share, now)
        for owner in charge.distinct():
            self.owners.count(owner, 0, 1)
        if not lease.beside:
            charge.begin(self._contended_s(lease), now)
            charge.expect(now + expected_s)
        self._recharge(charge, expected_s * share)

    def named(self, lease: ActiveLease, function: str, expected_s: float) -> None:
        """A call of this function runs under a lease, perhaps one that an earlier leader gave.

        Charge what was used under a lease that its caller keeps, and this call.
        """
        now, charge = self._cluster.now, self.charges.get(lease.id)
        if charge is None:
            self._charge(lease, [self.owners.of(function)], expected_s)
            return
        charge.wake(self._contended_s(lease), now)
        self._recharge(charge, charge.used_s(now) + expected_s * charge.share)
        charge.expect(now + expected_s)
        self._may_have_room(charge)

    def rests(self, lease: ActiveLease, since_s: float) -> None:
        charge = self.charges.get(lease.id)
        if charge is not None:
            charge.rest(since_s, self._contended_s(lease), self._cluster.now)
            self._may_have_room(charge)

    def called(self, lease: ActiveLease, began_s: float, ended_s: float) -> None:
        charge = self.charges.get(lease.id)
        if charge is not None:
            charge.called(began_s, ended_s, self._cluster.now)

    def computed(self, lease: ActiveLease, computed_s: float) -> None:
        charge = self.charges.get(lease.id)
        if charge is not None:
            charge.computed(computed_s, self._contended_s(lease), self._cluster.now)

    def computes(self, lease: ActiveLease) -> None:
        """A lease that was loading beside the runs of others has its slot from now on."""
        charge = self.charges.get(lease.id)
        if charge is not None:
            charge.begin(self._contended_s(lease), self._cluster.now)
            charge.expect(lease.due_s)

    def stands_aside(self, lease: ActiveLease) -> None:
        """A lease that loads has its slot no more, until what it loads is there."""
        charge = self.charges.get(lease.id)
        if charge is not None:
            charge.wake(self._contended_s(lease), self._cluster.now)
            charge.end(self._cluster.now)
            charge.runs = False
            self._may_have_room(charge)

    def ended(self, lease: ActiveLease) -> None:
        """A lease is over: its owners are charged for what it has used."""
        now, charge = self._cluster.now, self.charges.pop(lease.id, None)
        if charge is None:
            return
        self._recharge(charge, charge.used_s(now))
        for owner in charge.distinct():
            self.owners.count(owner, 0, -1)
        charge.wake(self._contended_s(lease), now)
        charge.end(now)
        for owner in charge.distinct():
            self.order.list(owner)
            self.order.paused.may_have_room(owner)

    def _recharge(self, charge: "LeaseCharge", seconds: float) -> None:
        change_s, charge.charge_s = seconds - charge.charge_s, seconds
        for owner in charge.owners:
            self.order.charge(owner, change_s)

    def _may_have_room(self, charge: "LeaseCharge") -> None:
        for owner in charge.distinct():
            self.order.paused.may_have_room(owner)

    def _contended_s(self, lease: ActiveLease) -> float:
        return self._cluster.contended_s(lease.slot, self._cluster.now)

    def yields(self, lease: LeaseId) -> bool:
        """Whether its caller must not keep this lease: its owner has too much of something."""
        order = self.order
        others_wait = self._cluster.waiting.count or order.held > order.paused.count
        charge = self.charges.get(lease)
        for function in () if charge is None else charge.distinct():
            if self.takes_turns and others_wait and order.is_ahead(function.space):
                return True
            for owner in both(function):
                most = owner.terms.leases
                if most is not None and owner.leases > most:
                    return True
                if is_over_gpu_s(owner, self._cluster.now):
                    return True
        return False

    def make_room(
        self,
        chosen: Sequence[Pending],
        loads: Sequence[tuple[ModelId, int]],
        slot: Slot,
        out: list[Action],
    ) -> bool:
        """Keep quotas of resident bytes as these loads begin; False: their requests must wait."""
        functions = [turn.owner for pending in chosen if (turn := self.order.turns.get(pending.id))]
        spared = slot.gpu, chosen[0].bundle.models
        return make_room(with_quota(functions), loads, spared, self._cluster, out)

    def make_room_ahead(
        self,
        model: ModelId,
        loads: Sequence[tuple[ModelId, int]],
        slot: Slot,
        out: list[Action],
    ) -> bool:
        """The same, for the load of a model without a request."""
        owners = owners_of(model, self.owners)
        return make_room(owners, loads, (slot.gpu, (model,)), self._cluster, out)

    # -- parts ----------------------------------------------------------------------------------

    def _turn(self, pending: Pending) -> Turn:
        turns, function = self.order.turns, pending.request.function
        turn = turns.get(pending.id)
        if turn is None:
            owner = self.owners.of(function)
            priority = owner.terms.priority + owner.space.terms.priority
            head_s = head_start_s(pending, priority, self._cluster.now)
            turn = turns[pending.id] = Turn(pending, owner, head_s)
        elif not turn.queued:  # its owner may have been forgotten meanwhile
            turn.owner = self.owners.of(function)
        return turn

    def _queue(self, turn: Turn) -> None:
        turn.charge_s = self.order.estimate_s(turn.pending.bundle)
        turn.queued = True
        self.owners.count(turn.owner, 1, 0)
        for owner in both(turn.owner):
            owner.queued_s += turn.charge_s

    def _unqueue(self, turn: Turn) -> None:
        """A request waits no more; what it was charged in advance is given back."""
        self._withdraw(turn)
        self.order.paused.waits_no_more(turn)
        turn.queued = False
        self.owners.count(turn.owner, -1, 0)
        for owner in both(turn.owner):
            owner.queued_s -= turn.charge_s

    def _show(self, turn: Turn) -> None:
        """A request counts as exposed, which was so before anybody followed it."""
        turn.exposed = True
        for owner in both(turn.owner):
            owner.exposed += 1
        self.order.charge(turn.owner, turn.charge_s)

    def _withdraw(self, turn: Turn) -> None:
        if turn.exposed:
            turn.exposed = False
            for owner in both(turn.owner):
                owner.exposed -= 1
            self.order.charge(turn.owner, -turn.charge_s)


class LeaseCharge:
    """One lease: each of its requests' `owners` was charged `charge_s` seconds of GPU time.

    Each has a `share` of the lease's slots since `since_s`, and until `due_s` by estimate; not yet
    if it is only loading, beside the runs of others. While it is kept and no call runs (`rests_s`:
    since then; else one runs since `woke_s`), its time counts for no quota, but for what others
    wait, from `contended_s` of its slot's contention on; and for the calls that are reported when
    they have ended, `called_s` of them. Before that it was kept for `kept_s`, of which `others_s`
    were counted.
    """

    def __init__(self, owners: Sequence[FunctionOwner], share: float, since_s: float) -> None:
        self.owners = owners
        self.share = share
        self.since_s = since_s
        self.due_s = self.woke_s = since_s
        self.charge_s = 0.0
        self.runs = False
        self.rests_s: float | None = None
        self.contended_s = self.called_s = self.kept_s = self.others_s = 0.0

    def used_s(self, now: float) -> float:
        """What each request has used until now."""
        return max(0.0, now - self.since_s) * self.share if self.runs else 0.0

    def distinct(self) -> Sequence[FunctionOwner]:
        """Its functions, each once."""
        return self.owners if len(self.owners) == 1 else list(dict.fromkeys(self.owners))

    def begin(self, contended_s: float, since_s: float) -> None:
        self.contended_s = contended_s
        self.runs, self.rests_s = True, None
        self.since_s = self.due_s = self.woke_s = since_s
        self._run(+1, since_s, since_s)

    def end(self, now: float) -> None:
        if self.runs and self.rests_s is None:
            self._run(-1, self.due_s, now)

    def rest(self, since_s: float, contended_s: float, now: float) -> None:
        """No call has run under it since then."""
        if self.runs and self.rests_s is None:
            kept_s = max(0.0, now - max(since_s, self.woke_s))
            self.correct(min(kept_s, contended_s - self.contended_s) - kept_s, now)
            self._run(-1, self.due_s, now)
            self.rests_s, self.contended_s = now, contended_s
            self.called_s = self.kept_s = self.others_s = 0.0

    def wake(self, contended_s: float, now: float) -> None:
        """A call runs under it again, or it ends: count for what others have waited meanwhile."""
        if self.rests_s is not None:
            self._count_rest(self.rests_s, contended_s, now)
            self.rests_s, self.due_s, self.woke_s = None, now, now
            self._run(+1, now, now)

    def called(self, began_s: float, ended_s: float, now: float) -> None:
        """A call has run under it then, while it seemed to rest."""
        if self.rests_s is not None:
            called_s = max(0.0, ended_s - max(began_s, self.rests_s))
            self.called_s += called_s
            self.correct(called_s, now)

    def computed(self, computed_s: float, contended_s: float, now: float) -> None:
        """Calls have run under it for so long since it was last said, while it seemed to rest."""
        if self.rests_s is not None:
            self.called_s += computed_s
            self.correct(computed_s, now)
            self._count_rest(self.rests_s, contended_s, now)

    def _count_rest(self, since_s: float, contended_s: float, now: float) -> None:
        """Count for what others have waited since then, and for no more than it has rested."""
        kept_s = now - since_s - self.called_s
        waited_s = min(kept_s, contended_s - self.contended_s)
        self.kept_s += kept_s
        before_s = self.others_s
        self.others_s = max(0.0, min(before_s + max(0.0, waited_s), self.kept_s))
        self.correct(self.others_s - before_s, now)
        self.rests_s, self.contended_s, self.called_s = now, contended_s, 0.0

    def correct(self, used_s: float, now: float) -> None:
        """Its calls have used its slots for so much more than was counted, or less."""
        for function in self.owners:
            for owner in both(function):
                owner.correct(self.share * used_s, now)

    def _run(self, sign: int, due_s: float, now: float) -> None:
        for function in self.owners:
            for owner in both(function):
                owner.due_sum_s += sign * self.share * due_s
                owner.run(sign * self.share, now)

    def expect(self, due_s: float) -> None:
        if self.runs and self.rests_s is None:
            later_s, self.due_s = self.share * (due_s - self.due_s), due_s
            for function in self.owners:
                for owner in both(function):
                    owner.due_sum_s += later_s
