"""The quota of bytes in GPU memory: an owner's own idle models leave before it exceeds that."""

from collections.abc import Iterable, Sequence

from cache_manager.model.ids import ModelId, tenant_of
from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.pending import Bundle
from scheduler.core.state.slots import Gpu
from scheduler.core.tenants.owner_table import OwnerTable, both
from scheduler.core.tenants.owners import FunctionOwner, Owner, TenantSpace
from scheduler.model.actions import Action, Demote

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
    found: dict[Owner, None] = {}
    for function in functions:
        for owner in both(function):
            if owner.terms.resident_bytes is not None:
                found[owner] = None
    return list(found)


def owners_of(model: ModelId, owners: OwnerTable) -> list[Owner]:
    """The owners with such a quota that this model counts for."""
    space = owners.spaces.get(tenant_of(model))
    if space is None:
        return []
    found: list[Owner] = [space] if space.terms.resident_bytes is not None else []
    found += [owner for owner in space.functions.values() if model in owner.models]
    return found


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
