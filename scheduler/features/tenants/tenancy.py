"""Namespaces and functions that share the cluster: weights, priorities, and quotas; off by default.

A layer under every policy: policies see only the requests whose turn it is, and keep their
locality, batches and costs. It is on while a policy has a `lead_s` or any owner has terms.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from scheduler import policies
from scheduler.cluster.request_queue import Bundle, Pending, Standing
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.state import ClusterState
from scheduler.core.layer import Handler, Layer
from scheduler.core.lifecycle import Lifecycle
from scheduler.features.tenants import limits
from scheduler.features.tenants.owners import FunctionOwner, Owner, OwnerTable, Turn, both
from scheduler.features.tenants.turn_order import TurnOrder
from scheduler.model.actions import Finish
from scheduler.model.events import Event, TermsSet
from scheduler.model.values import CoreSettings, LeaseId, LeaseUse, RequestOutcome
from scheduler.policies.placement_policy import Policy

# While slots are idle the policy may choose among so many requests for each, if that many wait.
# With more of them it would use idle slots better, and delay namespaces more that come meanwhile.
_CHOICE = 4
_MOST_AT_ONCE = 64
# How many functions that lacked room in their quota are looked at again after an event.
_MOST_RETRIED = 8


class Tenancy(Layer):
    """Follows every request and lease of every owner, while it is on."""

    def __init__(self, lifecycle: Lifecycle, settings: CoreSettings) -> None:
        self.on = False
        self.owners = OwnerTable()
        self.order = TurnOrder(lifecycle.cluster, self.owners)
        self.charges: dict[LeaseId, LeaseCharge] = {}  # leases in force of known functions
        self._refused: list[tuple[Pending, RequestOutcome, str]] = []
        self._cluster = lifecycle.cluster
        self._lifecycle = lifecycle
        self._max_waiting = settings.max_waiting
        self._diverted = False

    @property
    def takes_turns(self) -> bool:
        """Whether namespaces share the GPUs by their weights."""
        return self.order.lead_s > 0.0

    # -- on and off -----------------------------------------------------------------------------

    def handlers(self) -> dict[type[Event], Handler]:
        return {TermsSet: (self._terms_set, True)}

    def _terms_set(self, event: TermsSet) -> None:
        cluster, name = self._cluster, event.owner
        if cluster.queued > cluster.waiting.count + cluster.held:  # some wait for one slot
            for slot in cluster.slots.values():
                self._lifecycle.recall(slot)
        self.owners.set_terms(name, event.terms, cluster.now)
        self.order.paused.terms_changed()
        if "/" not in name:
            self._share_memory()
        self._switch()
        for owner in list(self.order.stuck):
            self._free(owner)
        concerned = self.owners.functions_of(name)
        if not self.on or not concerned:
            return
        for pending in list(cluster.waiting):
            turn = self.order.turns[pending.id]
            if turn.owner in concerned:
                self._lifecycle.leave_queue(pending)
                self._hold_again(turn)
        for turn in self.order.turns.values():
            if turn.owner.name == name:
                limits.note_named(turn.owner, turn.pending.models, cluster)
        for owner in concerned:
            self.order.list(owner)

    def policy_set(self, policy: Policy) -> None:
        """From now on policies see requests whose turn is so much later than the first turn.

        All requests that wait are sorted anew; none waits for one slot.
        """
        order, cluster, lead_s = self.order, self._cluster, policies.lead_s(policy)
        if lead_s == order.lead_s:
            return
        order.lead_s = lead_s
        cluster.by_arrival = not lead_s
        self._share_memory()
        if not self.on:
            self._switch()
        for pending in list(cluster.waiting):
            self._lifecycle.leave_queue(pending)
            self._hold_again(order.turns[pending.id])
        for turn in [turn for turn in order.turns.values() if turn.held]:
            order.let_go(turn)
            order.hold(turn)
        cluster.visits.clear()
        cluster.latest_seq = 0
        self._switch()

    def _share_memory(self) -> None:
        """Where namespaces take turns they also have parts of the memory, by their weights."""
        weights = {
            name: terms.weight for name, terms in self.owners.terms.items() if "/" not in name
        }
        self._cluster.index.parts.share(weights if self.takes_turns else None)

    def _switch(self) -> None:
        """Begin to follow everything there is, or stop."""
        on = self.takes_turns or bool(self.owners.terms)
        if on == self.on:
            return
        self.on = on
        if on:
            self._lifecycle.switch_on(self)
            for pending in self._cluster.requests.values():
                if pending.standing in (Standing.WAITING, Standing.LOCAL):
                    turn = self.order.turn(pending)
                    self.order.queue(turn)
                    self.order.expose(turn)
            for lease in self._cluster.leases.values():
                self.granted(lease)
            return
        for owner in list(self.order.stuck):
            self._free(owner)
        held = [turn for turn in self.order.turns.values() if turn.held]
        for turn in sorted(held, key=attrgetter("arrival")):
            self._expose(turn)
        for turn in self.order.turns.values():
            turn.pending.seq = turn.arrival
        self.order.turns.clear()
        self.order.paused.clear()
        self.charges.clear()
        self.owners.clear()

    def _hold_again(self, turn: Turn, *, stuck: bool = False) -> None:
        """Hold back a request that policies have seen, and that is in no queue now."""
        self.order.withdraw(turn)
        turn.pending.pauses = limits.must_pause(turn, self._cluster.now)
        if stuck:
            self.order.stuck[turn.owner] = None
        self.order.hold(turn)

    # -- requests -------------------------------------------------------------------------------

    def refusal(self, pending: Pending, *, promised: bool) -> Finish | None:
        """By a quota, or since its namespace fills its part of the queue."""
        cluster, request = self._cluster, pending.request
        if not promised:
            self.owners.forget_when_due(self.order.virtual_s)
            owner = self.owners.of(request.function)
            over = limits.refusal(owner, pending, cluster) if owner.has_quotas else None
            if over is not None:
                self.owners.count_refusal(over.owner, over.quota)
                outcome = RequestOutcome.OVER_QUOTA
                return Finish(request.id, outcome, over.reason, None, over.again_s)
        pauses = pending.pauses = self._pauses(pending)
        limit, rivals = self._max_waiting, cluster.paused if pauses else cluster.contending
        if limit is None or rivals >= limit or not self.takes_turns:
            return None
        if self.owners.may_wait(request.function, limit, paused=pauses):
            return None
        reason = f"{cluster.queued} requests wait, and of its namespace more than its part"
        return Finish(request.id, RequestOutcome.QUEUE_FULL, reason)

    def _pauses(self, pending: Pending) -> bool:
        """Whether its call goes on, and a quota of GPU time has no room for it."""
        request = pending.request
        return request.goes_on and limits.lacks_gpu_time(
            self.owners.of(request.function), pending.bundle, self._cluster
        )

    def wait_s(self, function: str) -> float | None:
        return self.owners.wait_s(function, self._cluster.pace) if self.takes_turns else None

    def holds_back(self, pending: Pending) -> bool:
        """Until its turn."""
        cluster, order = self._cluster, self.order
        turn = order.turn(pending)
        if turn.exposed:
            return False
        pending.pauses = self._pauses(pending)
        order.queue(turn)
        limits.note_named(turn.owner, pending.models, cluster)
        is_new = pending.lease is None
        if is_new and not cluster.held and order.comes_at_once(turn):
            order.take(turn)
            return False
        self.order.hold(turn)
        return True

    def let_go(self, pending: Pending) -> None:
        """One that was refused has left already."""
        turn = self.order.turns.get(pending.id)
        if turn is not None and turn.held:
            self.order.let_go(turn)

    def finished(self, pending: Pending) -> None:
        turn = self.order.turns.pop(pending.id, None)
        if turn is not None and turn.queued:
            self.order.unqueue(turn)
            self.owners.forget_when_due(self.order.virtual_s)

    def gpus_return(self) -> None:
        self.owners.pause()

    # -- turns ----------------------------------------------------------------------------------

    def is_due(self) -> bool:
        return self.order.paused.is_due()

    def expose(self) -> None:
        """Look also whether what lacked room in a quota, of bytes or GPU time, has it now."""
        order = self.order
        if self._cluster.paused:
            order.resume()
        for owner in list(order.stuck)[:_MOST_RETRIED]:
            first = owner.turns.first()
            if first is None or limits.has_room(owner, first.pending.bundle, self._cluster):
                self._free(owner)
            else:  # others are looked at next time
                order.stuck[owner] = order.stuck.pop(owner)
        self._expose_all()
        if not self.on:
            self._lifecycle.switch_off(self)

    def expose_more(self) -> bool:
        """Others may have their turn by what the policy decided, or while slots are idle."""
        order = self.order
        if not self._cluster.held:
            return False
        more = self._diverted or order.next() is not None or order.resume()
        if more or self._expose_spare():
            self._expose_all()
            return True
        room_s = order.paused.next_s()
        if room_s is not None:
            self._lifecycle.wake(room_s)
        return False

    def _expose_all(self) -> None:
        """Let the policy see all whose turn it is, and end those that no longer fit by then."""
        self._diverted = False
        while self._cluster.held and (turn := self.order.next()) is not None:
            self._expose(turn)
        while self._refused:
            pending, outcome, reason = self._refused.pop()
            self._lifecycle.take(pending)
            self._lifecycle.finish(pending, outcome, reason)

    def _expose_spare(self) -> bool:
        """Let it see one more while slots are idle: others use what an owner leaves.

        If it has enough to choose from, takes nothing, and nothing runs, it sees many more at once:
        no later event may come, and what waits may need a GPU that is away.
        """
        cluster, order = self._cluster, self.order
        room = cluster.idle_slots
        if not room and cluster.loadable is not None and cluster.loadable.has_any():
            room = 1
        if not cluster.held or not room:
            return False
        enough = cluster.waiting.count >= _CHOICE * room
        if enough and cluster.leases:
            return False
        exposed = False
        for _ in range(_MOST_AT_ONCE if enough else 1):
            turn = order.next(spare=True)
            if turn is None:
                break
            self._expose(turn)
            exposed = True
        return exposed

    def _free(self, owner: FunctionOwner) -> None:
        del self.order.stuck[owner]
        self.order.list(owner)

    def _expose(self, turn: Turn) -> None:
        """Let the policy see a request, unless it has grown too large while it was held back."""
        pending = turn.pending
        if self._lifecycle.too_large(pending.bundle):
            reason = "its models have grown, and no GPU is so large"
            self._refuse(turn, RequestOutcome.TOO_LARGE, reason)
            return
        over = limits.too_many_bytes(turn.owner, pending.bundle)
        if over is not None:
            self.owners.count_refusal(over.owner, over.quota)
            self._refuse(turn, RequestOutcome.OVER_QUOTA, over.reason)
            return
        self.order.take(turn)
        self._lifecycle.enter_queue(pending)

    def _refuse(self, turn: Turn, outcome: RequestOutcome, reason: str) -> None:
        self.order.let_go(turn)
        self._refused.append((turn.pending, outcome, reason))

    # -- leases ---------------------------------------------------------------------------------

    def granted(self, lease: ActiveLease) -> None:
        self._grant(lease, lease.requests)

    def adopted(self, lease: ActiveLease) -> None:
        self._grant(lease, ())

    def rejoined(self, lease: ActiveLease, pending: Pending) -> None:
        self._grant(lease, (pending,))

    def _grant(self, lease: ActiveLease, chosen: Sequence[Pending]) -> None:
        owners = []
        for pending in chosen:
            turn = self.order.turn(pending)
            if turn.queued:
                self.order.unqueue(turn)
            owners.append(turn.owner)
        self._charge(lease, owners, max(0.0, lease.due_s - self._cluster.now))
        if lease.own and not lease.loading:
            self.kept(lease, self._cluster.now)

    def _charge(self, lease: ActiveLease, owners: list[FunctionOwner], expected_s: float) -> None:
        """Charge these owners in equal parts, perhaps with others that had the lease already."""
        if lease.id in self.charges:
            owners = [*self.charges[lease.id].owners, *owners]
            self.ended(lease)
        charge = self.charges[lease.id] = LeaseCharge(self._cluster, lease, owners)
        for owner in charge.distinct():
            self.owners.count(owner, leases=1)
        if not lease.beside:
            charge.begin(self._cluster.now + expected_s)
        self._recharge(charge, expected_s * charge.share)

    def placed(self, function: str, count: int) -> None:
        if self.takes_turns:
            space = self.owners.of(function).space
            if space.contending:
                space.pace.placed(count, self._cluster.now)

    def calls_reported(self, lease: ActiveLease, function: str, run_s: float) -> None:
        """Charge what was used under a lease that its caller keeps, and a call that runs now."""
        charge = self.charges[lease.id]
        if not charge.owners:  # an earlier leader gave it
            self._charge(lease, [self.owners.of(function)], run_s)
            return
        charge.wake()
        self._recharge(charge, charge.used_s() + run_s * charge.share)
        charge.expect(self._cluster.now + run_s)
        self._may_have_room(charge)

    def kept(self, lease: ActiveLease, since_s: float) -> None:
        charge = self.charges[lease.id]
        charge.rest(since_s)
        self._may_have_room(charge)

    def called(self, lease: ActiveLease, use: LeaseUse, began_s: float, ended_s: float) -> None:
        self.charges[lease.id].called(began_s, ended_s)

    def computed(self, lease: ActiveLease, computed_s: float) -> None:
        self.charges[lease.id].computed(computed_s)

    def loaded(self, lease: ActiveLease, *, joins: bool) -> None:
        if joins:
            self.charges[lease.id].begin(lease.due_s)

    def stands_aside(self, lease: ActiveLease) -> None:
        charge = self.charges[lease.id]
        charge.end()
        charge.runs = False
        self._may_have_room(charge)

    def ended(self, lease: ActiveLease) -> None:
        """Its owners are charged for what it has used."""
        charge = self.charges.pop(lease.id)
        self._recharge(charge, charge.used_s())
        for owner in charge.distinct():
            self.owners.count(owner, leases=-1)
        charge.end()
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

    def may_be_kept(self, lease: ActiveLease) -> bool:
        """Not if its owner has too much of something."""
        order, cluster = self.order, self._cluster
        others_wait = cluster.waiting.count or cluster.held > cluster.paused
        for function in self.charges[lease.id].distinct():
            if self.takes_turns and others_wait and order.is_ahead(function.space):
                return False
            for owner in both(function):
                most = owner.terms.leases
                if most is not None and owner.leases > most:
                    return False
                if limits.is_over_gpu_s(owner, cluster.now):
                    return False
        return True

    def allows(self, chosen: tuple[Pending, ...], bundle: Bundle, slot: Slot) -> bool:
        """Have owners' idle models leave that their quotas leave no room for beside a load.

        Where that is not enough, or other quotas are used up, the requests are held back.
        """
        cluster = self._cluster
        turns = [self.order.turns[pending.id] for pending in chosen]  # of one function
        if turns and not turns[0].owner.has_quotas:
            return True
        over = [turn for turn in turns if limits.lost_its_turn(turn, cluster.now)]
        loads = [need for need in bundle.needs if need[0] not in slot.residents]
        if not over:
            model, spared = bundle.models[0], (slot.gpu, bundle.models)
            owners = both(turns[0].owner) if turns else limits.owners_of(model, self.owners)
            if not loads or limits.make_room(owners, loads, spared, cluster, cluster.out):
                return True
        for turn in over or turns:
            self._lifecycle.take(turn.pending)
            cluster.contending += 1
            self._hold_again(turn, stuck=not over)
            self._diverted = True
        return False


class LeaseCharge:
    """One lease: each of its requests' `owners` was charged `charge_s` seconds of GPU time.

    Nobody, of a prefetch, or while it is not known who has a lease of an earlier leader. Each has
    a `share` of the lease's slots since `since_s`, and until `due_s` by estimate; not yet
    if it is only loading, beside the runs of others. While it is kept and no call runs (`rests_s`:
    since then; else one runs since `woke_s`), its time counts for no quota, but for what others
    wait, from `contended_s` of its slot's contention on; and for the calls that are reported when
    they have ended, `called_s` of them. Before that it was kept for `kept_s`, of which `others_s`
    were counted.
    """

    def __init__(
        self, cluster: ClusterState, lease: ActiveLease, owners: Sequence[FunctionOwner]
    ) -> None:
        self.owners = owners
        self.share = (1 + len(lease.more)) / max(1, len(owners))
        self.charge_s = 0.0
        self.runs = False
        self._cluster = cluster
        self._slot = lease.slot
        self._since_s = self._due_s = self._woke_s = cluster.now
        self.rests_s: float | None = None
        self._contended_s = self._called_s = self._kept_s = self._others_s = 0.0

    def used_s(self) -> float:
        """What each request has used until now."""
        return max(0.0, self._cluster.now - self._since_s) * self.share if self.runs else 0.0

    def distinct(self) -> Sequence[FunctionOwner]:
        """Its functions, each once."""
        return self.owners if len(self.owners) == 1 else list(dict.fromkeys(self.owners))

    def begin(self, due_s: float) -> None:
        now = self._cluster.now
        self._contended_s = self._cluster.contended_s(self._slot)
        self.runs, self.rests_s = True, None
        self._since_s = self._due_s = self._woke_s = now
        self._run(+1, now)
        self.expect(due_s)

    def end(self) -> None:
        self.wake()
        if self.runs:
            self._run(-1, self._due_s)

    def rest(self, since_s: float) -> None:
        """No call has run under it since then."""
        if self.runs and self.rests_s is None:
            now, contended_s = self._cluster.now, self._cluster.contended_s(self._slot)
            kept_s = max(0.0, now - max(since_s, self._woke_s))
            self._correct(min(kept_s, contended_s - self._contended_s) - kept_s)
            self._run(-1, self._due_s)
            self.rests_s, self._contended_s = now, contended_s
            self._called_s = self._kept_s = self._others_s = 0.0

    def wake(self) -> None:
        """A call runs under it again, or it ends: count for what others have waited meanwhile."""
        if self.rests_s is not None:
            now = self._cluster.now
            self._count_rest(self.rests_s)
            self.rests_s, self._due_s, self._woke_s = None, now, now
            self._run(+1, now)

    def called(self, began_s: float, ended_s: float) -> None:
        """A call has run under it then, while it seemed to rest."""
        if self.rests_s is not None:
            called_s = max(0.0, ended_s - max(began_s, self.rests_s))
            self._called_s += called_s
            self._correct(called_s)

    def computed(self, computed_s: float) -> None:
        """Calls have run under it for so long since it was last said, while it seemed to rest."""
        if self.rests_s is not None:
            self._called_s += computed_s
            self._correct(computed_s)
            self._count_rest(self.rests_s)

    def _count_rest(self, since_s: float) -> None:
        """Count for what others have waited since then, and for no more than it has rested."""
        now, contended_s = self._cluster.now, self._cluster.contended_s(self._slot)
        kept_s = now - since_s - self._called_s
        waited_s = min(kept_s, contended_s - self._contended_s)
        self._kept_s += kept_s
        before_s = self._others_s
        self._others_s = max(0.0, min(before_s + max(0.0, waited_s), self._kept_s))
        self._correct(self._others_s - before_s)
        self.rests_s, self._contended_s, self._called_s = now, contended_s, 0.0

    def _correct(self, used_s: float) -> None:
        """Its calls have used its slots for so much more than was counted, or less."""
        for owner in self._charged():
            owner.correct(self.share * used_s, self._cluster.now)

    def _run(self, sign: int, due_s: float) -> None:
        for owner in self._charged():
            owner.due_sum_s += sign * self.share * due_s
            owner.run(sign * self.share, self._cluster.now)

    def expect(self, due_s: float) -> None:
        if self.runs and self.rests_s is None:
            later_s, self._due_s = self.share * (due_s - self._due_s), due_s
            for owner in self._charged():
                owner.due_sum_s += later_s

    def _charged(self) -> Iterator[Owner]:
        for function in self.owners:
            yield from both(function)
