"""Quotas: which requests are refused on arrival, and how much GPU memory an owner's models take."""

from collections.abc import Iterable, Sequence

from cache_manager.model.ids import ModelId, tenant_of
from scheduler.cluster.request_queue import Bundle
from scheduler.cluster.slots import Gpu
from scheduler.cluster.state import ClusterState
from scheduler.core.tenants.owners import FunctionOwner, Owner, OwnerTable, TenantSpace, both
from scheduler.model.actions import Action, Demote


def refused_by(reason: str) -> tuple[str, str]:
    """The owner and the quota that the reason of a refusal names."""
    _, quota, _, rest = reason.split(" ", 3)
    return rest.partition(": ")[0], quota


# So many calls of a namespace may wait for GPU time.
MOST_PAUSED = 1_000


class QuotaRefusal:
    """Why a request is refused, by which quota of whom; and in how long there may be room."""

    def __init__(self, owner: Owner, quota: str, detail: str, again_s: float | None) -> None:
        self.reason = f"quota {quota} of {owner.name or 'functions without a namespace'}: {detail}"
        self.again_s = again_s


def refusal(
    function: FunctionOwner, bundle: Bundle, expected_s: float, now: float, *, goes_on: bool
) -> QuotaRefusal | None:
    """The first quota, of the function or of its namespace, that one more request exceeds.

    Of calls that go on, whose work so far would be lost, as many again may wait, and some for GPU
    time as well.
    """
    pauses = goes_on and function.space.paused < MOST_PAUSED
    too_large = too_many_bytes(function, bundle)
    if too_large is not None:
        return too_large
    for owner in both(function):
        terms = owner.terms
        if terms.waiting is not None and owner.waiting >= terms.waiting * (1 + goes_on):
            detail = f"{owner.waiting} of {terms.waiting} requests wait"
            return QuotaRefusal(owner, "waiting", detail, None)
        if terms.gpu_s is not None and not (pauses and terms.gpu_s > 0.0):
            refused = _gpu_time(owner, terms.gpu_s, expected_s, now)
            if refused is not None:
                return refused
    return None


def lacks_gpu_time(function: FunctionOwner, expected_s: float, now: float) -> bool:
    """Whether one more request of so many seconds would exceed a quota of GPU time."""
    for owner in both(function):
        most_s = owner.terms.gpu_s
        if most_s is not None and _gpu_time(owner, most_s, expected_s, now) is not None:
            return True
    return False


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


def _gpu_time(owner: Owner, most_s: float, expected_s: float, now: float) -> QuotaRefusal | None:
    """What was used, what is accepted and one more request must not exceed the quota together.

    A request that alone exceeds it may begin where nothing was used or accepted: its estimate may
    be wrong, and only a run can correct it.
    """
    used_s, to_come_s = owner.used_s(now), owner.to_come_s(now)
    short_s = used_s + to_come_s + expected_s - most_s
    if short_s <= 0.0 or (most_s > 0.0 and used_s <= 0.0 and not owner.busy):
        return None
    window = owner.window
    again_s = window.frees_in_s(short_s, now) if window is not None else None
    detail = (
        f"{used_s:.1f} of {most_s:g} s of GPU time used in {owner.terms.window_s:g} s, "
        f"{to_come_s:.1f} s accepted, {expected_s:.1f} s more asked for"
    )
    return QuotaRefusal(owner, "gpu_s", detail, again_s)


_MOST_NAMED = 256


def named(function: FunctionOwner, models: Sequence[ModelId], cluster: ClusterState) -> None:
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


def make_room(
    owners: Iterable[Owner],
    loads: Sequence[tuple[ModelId, int]],
    spared: tuple[Gpu, tuple[ModelId, ...]],
    cluster: ClusterState,
    out: list[Action],
) -> bool:
    """Demote idle models of these owners, so that the loads keep their quotas; False: they cannot.

    Models on the GPU that loads leave first, and else those that were not used for longest; those
    that are `spared` there are needed.
    """
    needed_bytes = sum(size for _, size in loads)
    victims: dict[tuple[Gpu, ModelId], None] = {}
    for owner in owners:
        most_bytes = owner.terms.resident_bytes
        if most_bytes is None:
            continue
        residents = _residents(owner, cluster)
        short_bytes = needed_bytes - most_bytes
        for gpu, model in residents:
            short_bytes += gpu.cache.residents[model].bytes if (gpu, model) not in victims else 0
        for gpu, model in _idle_first(residents, spared):
            if short_bytes <= 0:
                break
            if (gpu, model) not in victims:
                victims[gpu, model] = None
                short_bytes -= gpu.cache.residents[model].bytes
        if short_bytes > 0:
            return False
    for gpu, model in victims:
        cluster.evict(gpu, model)
        out.append(Demote(gpu.spec.id, model, "its owner's quota of resident bytes"))
    return True


def with_quota(functions: Iterable[FunctionOwner]) -> list[Owner]:
    """The owners of these that have a quota of resident bytes."""
    owners: dict[Owner, None] = {}
    for function in functions:
        for owner in both(function):
            if owner.terms.resident_bytes is not None:
                owners[owner] = None
    return list(owners)


def owners_of(model: ModelId, owners: OwnerTable) -> list[Owner]:
    """The owners with such a quota that this model counts for."""
    space = owners.spaces.get(tenant_of(model))
    if space is None:
        return []
    counted: list[Owner] = [space] if space.terms.resident_bytes is not None else []
    counted += [owner for owner in space.functions.values() if model in owner.models]
    return counted


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
    residents: list[tuple[Gpu, ModelId]], spared: tuple[Gpu, tuple[ModelId, ...]]
) -> list[tuple[Gpu, ModelId]]:
    here, needed = spared
    idle: list[tuple[bool, float, int]] = []
    for place, (gpu, model) in enumerate(residents):
        resident = gpu.cache.residents[model]
        if not resident.kept and not (gpu is here and model in needed):
            idle.append((gpu is not here, resident.used_s, place))
    idle.sort()
    return [residents[place] for _, _, place in idle]
