"""What must hold after every step of a core whose owners have weights and quotas; recounted."""

from collections import Counter, defaultdict

import pytest

from cache_manager.model.ids import tenant_of
from scheduler.cluster.request_queue import Standing
from scheduler.features.tenants.owners import FunctionOwner, Turn, namespace_of
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.features.tenants.turn_order import TurnOrder
from scheduler.model.actions import Action, Dispatch, Finish, Prepare
from scheduler.model.events import Event, RequestArrived, TermsSet
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import LeaseId, RequestOutcome
from tests.kit.cores.core_world import World
from tests.kit.cores.invariants import NO_DECISION, Invariants, has_room, refused_event

_ENOUGH = 4  # a policy chooses among so many requests for each idle slot, if that many wait
_REJOINED = "it was given this lease before"


class _Use:
    """Which slots each owner has had, and when: recounted from what is in force after each step."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, float, float]]] = {}
        self._rates: dict[str, float] = defaultdict(float)
        self._since_s = 0.0

    def look(self, rates: dict[str, float], now: float) -> None:
        """These many slots are in use from now on."""
        for name, rate in self._rates.items():
            if rate and now > self._since_s:
                self.spans.setdefault(name, []).append((self._since_s, now, rate))
        self._rates, self._since_s = rates, now

    def used_s(self, name: str, window_s: float, now: float) -> float:
        """What an owner has used in the last `window_s`."""
        begins_s = now - window_s
        return sum(
            rate * (ends_s - max(begins_s, since_s))
            for since_s, ends_s, rate in self.spans.get(name, ())
            if ends_s > begins_s
        )


class TenantInvariants(Invariants):
    """Checks one world with owners, step by step."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.held_back = self.paused = 0
        self._use = _Use()
        self.over_quota: Counter[str] = Counter()

    def step(self, event: Event) -> list[Action]:
        before = set(self.world.leases)
        accepted = isinstance(event, RequestArrived) and event.request.id not in self.world.sent
        actions = super().step(event)
        self._check_counts()
        self._check_gpu_time(event)
        self.held_back = max(self.held_back, self.world.core.cluster.held)
        for action in actions:
            if isinstance(action, Finish) and action.outcome is RequestOutcome.OVER_QUOTA:
                quota = action.reason.split()[1]
                self.over_quota[quota] += 1
                assert quota != "gpu_s" or not self.world.sent[action.request].goes_on
        if not isinstance(event, NO_DECISION) and not refused_event(event, actions):
            self._check_why_held_back()
            self._check_paused()
        self._check_leases(actions, before)
        self._check_residents(actions)
        if accepted and isinstance(event, RequestArrived):
            self._check_waiting(event, actions)
        return actions

    # -- what is counted ------------------------------------------------------------------------

    def _check_counts(self) -> None:
        """Every owner's counts are what a recount finds; nobody is followed while it is off."""
        core = self.world.core
        tenancy = core.layer(Tenancy)
        pending = core.requests.values()
        held = [each for each in pending if each.standing is Standing.HELD]
        assert tenancy.on == bool(tenancy.owners.terms or tenancy.order.lead_s)
        assert core.cluster.held == len(held)
        queue = [each for each in pending if each.standing in _QUEUED]
        assert core.cluster.queued == len(queue)
        if not tenancy.on:
            assert not tenancy.owners.functions
            assert not tenancy.order.turns
            assert not held
            return
        waiting: Counter[str] = Counter()
        exposed: Counter[str] = Counter()
        for each in queue:
            turn = tenancy.order.turns[each.id]
            assert turn.queued
            assert turn.exposed == (each.standing is not Standing.HELD), each.id
            assert turn.held == (each.standing is Standing.HELD), each.id
            for name in _names(each.request.function):
                waiting[name] += 1
                exposed[name] += turn.exposed
        leases = self._leases()
        for function in tenancy.owners.functions.values():
            for owner, name in (
                (function, function.name),
                (function.space, "=" + function.space.name),
            ):
                assert owner.waiting == waiting[name], f"{name} waits"
                assert owner.exposed == exposed[name], f"{name} is exposed"
                assert owner.leases == leases[name], f"{name} has leases"
        assert set(waiting) <= {name for each in tenancy.owners.functions for name in _names(each)}
        owners, spaces = tenancy.owners, tenancy.owners.spaces.values()
        busy = sum(each.weight for each in spaces if each.at_work)
        assert owners.busy.weight == pytest.approx(busy)
        queued = sum(each.weight for each in spaces if each.contending)
        assert owners.waiting.weight == pytest.approx(queued)
        assert tenancy.order.turns.keys() <= core.requests.keys()

    def _leases(self) -> Counter[str]:
        found: Counter[str] = Counter()
        core = self.world.core
        for lease in core.leases:
            charge = core.layer(Tenancy).charges.get(lease)
            for function in () if charge is None else charge.distinct():
                for name in _names(function.name):
                    found[name] += 1
        return found

    # -- who is held back -----------------------------------------------------------------------

    def _check_why_held_back(self) -> None:
        """Only those at a quota, or whose namespace is ahead, or behind others of it.

        And while slots are idle, only where the policy has others to choose from.
        """
        core = self.world.core
        tenancy, cluster = core.layer(Tenancy), core.cluster
        order = tenancy.order
        free: list[Turn] = []
        for space in tenancy.owners.spaces.values():
            heads = []
            for function in space.functions.values():
                first = function.turns.first()
                if first is not None and not _at_quota(function, order):
                    heads.append(first)
            free += heads
            if not heads:
                continue
            assert order.lead_s, f"{space.name} has requests held back, and no turns are taken"
            limit_s = order.virtual_s + order.lead_s * order.pace()
            least_s = space.virtual_s - max(each.head_s for each in heads) * order.pace()
            greatest_s = space.virtual_s - min(each.head_s for each in heads) * order.pace()
            assert greatest_s > limit_s or least_s <= limit_s <= greatest_s, space.name
        if free and cluster.idle_slots:
            assert cluster.waiting.count >= _ENOUGH * cluster.idle_slots
        if self.world.leases or any(self.world.loads.values()):
            return
        for turn in free:
            for slot in cluster.slots.values():
                if slot.gpu.active and not slot.leases:
                    assert not has_room(slot, turn.pending, spare_waiting=True), (
                        f"{turn.pending.id} is held back though {slot.id} has room"
                    )

    # -- quotas ---------------------------------------------------------------------------------

    def _check_paused(self) -> None:
        """Calls that go on are paused only where GPU time is used up, or another one goes first."""
        tenancy, now = self.world.core.layer(Tenancy), self.world.now
        queued = [each for each in tenancy.order.turns.values() if each.queued]
        paused = [each for each in queued if each in each.owner.paused_turns]
        assert self.world.core.cluster.paused == len(paused)
        self.paused = max(self.paused, len(paused))
        for space in tenancy.owners.spaces.values():
            for owner, (turn, _) in space.resumed.items():
                assert turn.queued, "what was resumed waits for its lease"
                assert turn.owner is owner
                assert turn not in owner.paused_turns
        next_s = tenancy.order.paused.next_s()
        comes_soon = next_s is not None and next_s <= now + 0.002  # it is not looked at too early
        for turn in paused if not comes_soon else ():
            owners = (turn.owner, turn.owner.space)
            assert turn.owner in turn.owner.space.resumed or any(
                tenancy.order.paused.short_s(each) > 0.0 for each in owners
            ), f"{turn.pending.id} is paused though there is room"
        for each in {owner for turn in queued for owner in (turn.owner, turn.owner.space)}:
            of_it = [turn for turn in paused if each in (turn.owner, turn.owner.space)]
            assert each.paused == len(of_it)

    def _terms_of(self, function: str) -> list[tuple[str, OwnerTerms]]:
        terms = self.world.core.layer(Tenancy).owners.terms
        space = namespace_of(function)
        owners = (function, space) if "/" in function else (space,)
        return [(owner, terms[owner]) for owner in owners if owner in terms]

    def _check_leases(self, actions: list[Action], before: set[LeaseId]) -> None:
        """No owner is given a lease beyond its quota."""
        leases = self._leases()
        for action in actions:
            if not isinstance(action, Dispatch) or action.lease in before:
                continue
            for request in action.requests:
                function = self.world.sent[request].function
                for owner, terms in self._terms_of(function):
                    name = owner if "/" in owner else "=" + owner
                    if terms.leases is not None and action.rule != _REJOINED:
                        assert leases[name] <= terms.leases, f"{owner} has too many leases"

    def _check_residents(self, actions: list[Action]) -> None:
        """No load exceeds the quota of those that it is for."""
        prepared = {each.lease for each in actions if isinstance(each, Prepare)}
        if any(_for_another(self.world, each) for each in actions if isinstance(each, Dispatch)):
            return  # loads for others than the models' owners count only for what comes later
        for action in actions:
            if not isinstance(action, Dispatch) or action.lease not in prepared:
                continue
            for request in action.requests:
                space = namespace_of(self.world.sent[request].function)
                terms = self.world.core.layer(Tenancy).owners.terms.get(space)
                if terms is not None and terms.resident_bytes is not None:
                    held_bytes = self._bytes_of(space)
                    assert held_bytes <= terms.resident_bytes, f"{space} holds {held_bytes}"

    def _check_gpu_time(self, event: Event) -> None:
        """The window of each owner has what its leases had slots for, and a part more at most."""
        tenancy, now = self.world.core.layer(Tenancy), self.world.now
        if isinstance(event, TermsSet) or not tenancy.on:
            self._use = _Use()  # windows may begin anew, and leases are followed from now on
        rates: dict[str, float] = defaultdict(float)
        for lease in self.world.core.leases.values():
            charge = tenancy.charges.get(lease.id)
            if charge is None or not charge.owners or lease.beside or charge.rests_s is not None:
                continue
            assert charge.share == pytest.approx((1 + len(lease.more)) / len(charge.owners))
            for function in charge.owners:
                for name in _names(function.name):
                    rates[name] += charge.share
        self._use.look(rates, now)
        for name, terms in tenancy.owners.terms.items():
            functions, spaces = tenancy.owners.functions, tenancy.owners.spaces
            owner = functions.get(name) if "/" in name else spaces.get(name)
            if owner is None or terms.gpu_s is None:
                continue
            key = name if "/" in name else "=" + name
            if owner.window is None or key not in self._use.spans:
                continue
            used_s = owner.used_s(now)
            assert used_s >= self._use.used_s(key, terms.window_s, now) - 1e-6, name

    def _bytes_of(self, space: str) -> int:
        gpus = self.world.core.cluster.gpus.values()
        residents = [each for gpu in gpus for each in gpu.cache.residents.values()]
        return sum(each.bytes for each in residents if tenant_of(each.model) == space)

    def _check_waiting(self, event: RequestArrived, actions: list[Action]) -> None:
        """A request is refused exactly where its owner has as many waiting as it may."""
        function = event.request.function
        core = self.world.core
        ended = any(isinstance(each, Finish) for each in actions)
        for owner, terms in self._terms_of(function):
            if terms.waiting is None or ended:
                continue
            queue = [
                each
                for each in core.requests.values()
                if each.standing in _QUEUED
                and owner in (each.request.function, namespace_of(each.request.function))
                and each.id != event.request.id
            ]
            most = terms.waiting * (2 if event.request.goes_on else 1)
            assert (
                len(queue) < most
                or event.request.id not in core.requests
                or any(isinstance(each, Dispatch) for each in actions)
            )


_QUEUED = (Standing.HELD, Standing.WAITING, Standing.LOCAL)


def _names(function: str) -> tuple[str, str]:
    return function, "=" + namespace_of(function)


def _for_another(world: World, given: Dispatch) -> bool:
    spaces = {namespace_of(world.sent[request].function) for request in given.requests}
    return any({tenant_of(model)} != spaces for model in given.models)


def _at_quota(function: FunctionOwner, order: TurnOrder) -> bool:
    return function in order.stuck or function.at_its_leases or function.space.at_its_leases
