"""What quotas refuse, have leave GPU memory, or pause."""

from collections.abc import Iterable, Sequence
from math import inf

from cache_manager.model.ids import ModelId, tenant_of
from scheduler.cluster.request_queue import Bundle, Pending
from scheduler.cluster.slots import Gpu, Slot
from scheduler.cluster.state import ClusterState
from scheduler.features.tenants.owners import (
    FunctionOwner,
    Lineup,
    Owner,
    OwnerTable,
    TenantSpace,
    Turn,
    both,
    estimate_s,
)
from scheduler.model.actions import Demote

# So many calls of a namespace may wait for GPU time.
MOST_PAUSED = 1_000
_MOST_NAMED = 256


class QuotaRefusal:
    """Why a request is refused, by which quota of whom; and in how long there may be room."""

    def __init__(self, owner: Owner, quota: str, detail: str, again_s: float | None) -> None:
        self.owner = owner.name
        self.quota = quota
        self.reason = f"quota {quota} of {owner.name or 'functions without a namespace'}: {detail}"
        self.again_s = again_s


def refusal(
    function: FunctionOwner, pending: Pending, cluster: ClusterState
) -> QuotaRefusal | None:
    """The first quota, of the function or of its namespace, that one more request exceeds.

    Of calls that go on, whose work so far would be lost, as many again may wait, and some for GPU
    time as well.
    """
    goes_on = pending.request.goes_on
    pauses = goes_on and function.space.paused < MOST_PAUSED
    too_large = too_many_bytes(function, pending.bundle)
    if too_large is not None:
        return too_large
    for owner in both(function):
        most = owner.terms.waiting
        if most is not None and owner.waiting >= most * (1 + goes_on):
            return QuotaRefusal(owner, "waiting", f"{owner.waiting} of {most} requests wait", None)
        too_long = None if pauses else _too_much_gpu_time(owner, pending.bundle, cluster)
        if too_long is not None:
            return too_long
    return None


def lacks_gpu_time(function: FunctionOwner, bundle: Bundle, cluster: ClusterState) -> bool:
    """Whether one more request for these models would exceed a quota of GPU time."""
    return any(_too_much_gpu_time(owner, bundle, cluster) for owner in both(function))


def too_many_bytes(function: FunctionOwner, bundle: Bundle) -> QuotaRefusal | None:
    """Whether these models alone need more than the function or its namespace may have."""
    for owner in both(function):
        most_bytes = owner.terms.resident_bytes
        if most_bytes is not None and bundle.bytes > most_bytes:
            detail = f"its models need {bundle.bytes} bytes of {most_bytes}"
            return QuotaRefusal(owner, "resident_bytes", detail, None)
    return None


def is_over_gpu_s(owner: Owner, now: float) -> bool:
    most_s = owner.terms.gpu_s
    return most_s is not None and owner.used_s(now) >= most_s


def must_pause(turn: Turn, now: float) -> bool:
    """Whether its call goes on, and a quota of GPU time is used up that had room for it."""
    owners = both(turn.owner) if turn.pending.request.goes_on else ()
    return any(is_over_gpu_s(owner, now) for owner in owners)


def lost_its_turn(turn: Turn, now: float) -> bool:
    """Whether quotas lack room that they had: time was used, or leases became known."""
    owner = turn.owner
    return owner.has_its_leases or owner.space.has_its_leases or must_pause(turn, now)


def _too_much_gpu_time(owner: Owner, bundle: Bundle, cluster: ClusterState) -> QuotaRefusal | None:
    """What was used, what is accepted and one more request must not exceed the quota together.

    A request that alone exceeds it may begin where nothing was used or accepted: its estimate may
    be wrong, and only a run can correct it.
    """
    most_s, window = owner.terms.gpu_s, owner.window
    if most_s is None or window is None:
        return None
    now, expected_s = cluster.now, estimate_s(bundle, cluster)
    used_s, to_come_s = owner.used_s(now), owner.to_come_s(now)
    short_s = used_s + to_come_s + expected_s - most_s
    if short_s <= 0.0 or (used_s <= 0.0 and not owner.busy):
        return None
    detail = (
        f"{used_s:.1f} of {most_s:g} s of GPU time used in {owner.terms.window_s:g} s, "
        f"{to_come_s:.1f} s accepted, {expected_s:.1f} s more asked for"
    )
    return QuotaRefusal(owner, "gpu_s", detail, window.frees_in_s(short_s, now))


def note_named(function: FunctionOwner, models: Sequence[ModelId], cluster: ClusterState) -> None:
    """A function with a quota of its own named these models: they count as its own."""
    if function.terms.resident_bytes is None:
        return
    own = function.models
    for model in models:
        own.pop(model, None)
        own[model] = None
    if len(own) > _MOST_NAMED:
        for model in [model for model in own if not cluster.index.copies(model)][: len(own) // 2]:
            del own[model]


def has_room(function: FunctionOwner, bundle: Bundle, cluster: ClusterState) -> bool:
    """Whether these models could be loaded once more, after its own idle ones have left."""
    for owner in both(function):
        most_bytes = owner.terms.resident_bytes
        if most_bytes is None:
            continue
        used_bytes = bundle.bytes
        for gpu, model in _residents(owner, cluster):
            resident = gpu.cache.residents[model]
            used_bytes += resident.bytes if resident.kept else 0
        if used_bytes > most_bytes:
            return False
    return True


def make_room(owners: Iterable[Owner], bundle: Bundle, slot: Slot, cluster: ClusterState) -> bool:
    """Demote idle models of these owners, so that a load keeps their quotas; False: it cannot.

    Models on the GPU that loads leave first, and else those that were not used for longest; those
    that the bundle needs there stay.
    """
    loads = [size_bytes for model, size_bytes in bundle.needs if model not in slot.residents]
    if not loads:
        return True
    needed_bytes = sum(loads)
    victims: dict[tuple[Gpu, ModelId], None] = {}
    for owner in owners:
        most_bytes = owner.terms.resident_bytes
        if most_bytes is None:
            continue
        residents = _residents(owner, cluster)
        short_bytes = needed_bytes - most_bytes
        for gpu, model in residents:
            short_bytes += gpu.cache.residents[model].bytes if (gpu, model) not in victims else 0
        for gpu, model in _idle_first(residents, slot.gpu, bundle.models):
            if short_bytes <= 0:
                break
            if (gpu, model) not in victims:
                victims[gpu, model] = None
                short_bytes -= gpu.cache.residents[model].bytes
        if short_bytes > 0:
            return False
    for gpu, model in victims:
        cluster.evict(gpu, model)
        cluster.out.append(Demote(gpu.spec.id, model, "its owner's quota of resident bytes"))
    return True


def owners_of(model: ModelId, owners: OwnerTable) -> Sequence[Owner]:
    """The owners that this model counts for."""
    space = owners.spaces.get(tenant_of(model))
    if space is None:
        return ()
    return space, *(owner for owner in space.functions.values() if model in owner.models)


def _residents(owner: Owner, cluster: ClusterState) -> list[tuple[Gpu, ModelId]]:
    """Where its models are: a namespace's by their names, a function's as it named them."""
    index = cluster.index
    if isinstance(owner, TenantSpace):
        models: Iterable[ModelId] = index.parts.models_of(owner.name)
    else:
        assert isinstance(owner, FunctionOwner)
        models = owner.models
    return [(cluster.gpus[gpu], model) for model in models for gpu in index.holders(model)]


def _idle_first(
    residents: list[tuple[Gpu, ModelId]], here: Gpu, needed: Sequence[ModelId]
) -> list[tuple[Gpu, ModelId]]:
    idle: list[tuple[bool, float, int]] = []
    for place, (gpu, model) in enumerate(residents):
        resident = gpu.cache.residents[model]
        if not resident.kept and not (gpu is here and model in needed):
            idle.append((gpu is not here, resident.used_s, place))
    idle.sort()
    return [residents[place] for _, _, place in idle]


# There is room once less than the quota is used, by so much at least; and a part of a window leaves
# it at a time that is computed in two ways.
_LEAST_S, _LATER_S = 1e-6, 0.001
_LOOKS = 10  # in a window, while it is not known when there is room


class PausedCalls:
    """The calls that pause, by their functions.

    Of each function one goes on at a time, once the quota has room by estimate beside what runs and
    what goes on already; the next one when that one has its lease.
    """

    def __init__(self, cluster: ClusterState, owners: OwnerTable) -> None:
        self._cluster = cluster
        self._owners = owners
        # When each function is looked at next: `inf` while its call before, or nothing, has room.
        self._looks: Lineup[tuple[float, int], FunctionOwner] = Lineup()

    def add(self, turn: Turn) -> None:
        owner = turn.owner
        owner.paused_turns[turn] = None
        self._count(owner, 1)
        if self._let_go(turn):  # there is no room any more
            owner.paused_turns.move_to_end(turn, last=False)
            self._wait_for_room(owner)
        elif owner not in self._looks.keys:
            self._look(owner, inf)
            if owner not in owner.space.resumed:
                self._wait_for_room(owner)

    def remove(self, turn: Turn) -> bool:
        """Return whether the call was paused."""
        owner = turn.owner
        if turn not in owner.paused_turns:
            return False
        del owner.paused_turns[turn]
        self._count(owner, -1)
        if not owner.paused_turns:
            self._looks.drop(owner)
            owner.space.behind.pop(owner, None)
        return True

    def waits_no_more(self, turn: Turn) -> None:
        """This request has its lease, or has ended."""
        if self._let_go(turn) and turn.owner.paused_turns:
            self._look(turn.owner, 0.0)

    def may_have_room(self, owner: FunctionOwner) -> None:
        """Something of it needs less GPU time than was expected."""
        behind = owner.space.behind
        for function in behind:
            self._look(function, 0.0)
        behind.clear()

    def due(self) -> list[Turn]:
        """Those that may go on now; their caller removes them."""
        turns = []
        while self.is_due():
            owner = self._looks.first()
            assert owner is not None
            self._look(owner, inf)
            if owner in owner.space.resumed:
                continue
            if any(self.short_s(each) > 0.0 for each in both(owner)):
                self._wait_for_room(owner)
                continue
            turn = next(iter(owner.paused_turns))
            needs_s = estimate_s(turn.pending.bundle, self._cluster)
            owner.space.resumed[owner] = turn, needs_s
            turns.append(turn)
        return turns

    def is_due(self) -> bool:
        look_s = self.next_s() if self._cluster.paused else None
        return look_s is not None and look_s <= self._cluster.now

    def next_s(self) -> float | None:
        """When there may be room next; None: not without another event."""
        owner = self._looks.first()
        look_s = inf if owner is None else self._looks.keys[owner][0]
        return look_s if look_s < inf else None

    def terms_changed(self) -> None:
        """There may be room at once."""
        for owner in self._looks.keys:
            self._look(owner, 0.0)

    def clear(self) -> None:
        self._looks = Lineup()

    def _count(self, owner: FunctionOwner, more: int) -> None:
        self._cluster.paused += more
        self._cluster.contending -= more
        self._owners.count(owner, paused=more)

    def _let_go(self, turn: Turn) -> bool:
        """Count this call no more as the one of its function that goes on; whether it was that."""
        resumed = turn.owner.space.resumed
        if turn.owner not in resumed or resumed[turn.owner][0] is not turn:
            return False
        del resumed[turn.owner]
        self.may_have_room(turn.owner)
        return True

    def short_s(self, owner: Owner) -> float:
        """By how much GPU time an owner lacks room; what runs and what comes counts by estimate."""
        most_s, now = owner.terms.gpu_s, self._cluster.now
        if most_s is None:
            return 0.0
        coming_s = 0.0
        if isinstance(owner, TenantSpace):  # a function is not asked while a call of it comes
            coming_s = sum(needs_s for _, needs_s in owner.resumed.values())
        running_s = owner.running_s(now) if owner.leases else 0.0
        return max(0.0, owner.used_s(now) + running_s + coming_s - most_s + _LEAST_S)

    def _wait_for_room(self, function: FunctionOwner) -> None:
        """Look again when both owners have room, if nothing more is used until then."""
        function.space.behind[function] = None
        at_s, now = 0.0, self._cluster.now
        for owner in both(function):
            short_s = self.short_s(owner)
            if owner.window is not None and short_s > 0.0:
                left_s = owner.window.frees_in_s(short_s, now)
                if left_s is None:  # what has not been used yet leaves later
                    left_s = owner.window.window_s / _LOOKS
                at_s = max(at_s, now + left_s + _LATER_S)
        self._look(function, at_s)

    def _look(self, owner: FunctionOwner, at_s: float) -> None:
        self._looks.put(owner, (at_s, owner.number))
