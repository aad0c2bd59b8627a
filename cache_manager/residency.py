"""The map of GPU memory: which GPU holds which model, in which order it was last used."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cache_manager.eviction.eviction_rule import EvictionRule, ResidentView
from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier, tenant_of
from cache_manager.model.request_rates import RequestRates

_NONE_EMPTIED: Mapping[ModelId, ModelId] = {}


class LoadPlan(NamedTuple):
    """What a GPU must load, and what must leave first, so that a request can run there.

    `emptied` says, by the models that left them, which empty processes take some of the loads, and
    `ends` which ones must end.
    """

    loads: tuple[tuple[ModelId, int], ...]
    victims: tuple[ModelId, ...]
    emptied: Mapping[ModelId, ModelId] = _NONE_EMPTIED
    ends: tuple[ModelId, ...] = ()


class KeptContext:
    """An empty process that a model left on a GPU, for the next model of the same tenant."""

    def __init__(self, model: ModelId, size_bytes: int, since_s: float) -> None:
        self.model = model
        self.bytes = size_bytes
        self.since_s = since_s


class SharedProcess:
    """A process with several models of one tenant, whose memory belongs to none of them alone."""

    def __init__(self, size_bytes: int, models: Iterable[ModelId]) -> None:
        self.bytes = size_bytes
        self.models = dict.fromkeys(models)


class ResidentModel:
    """One model in one GPU's memory: used by leases, waited for by requests, pinned by a person.

    `uses` counts the leases since it came; without users it is idle since `idle_s`. Its calls have
    this share of the GPU's multiprocessors, as its node says; nothing is decided by that.
    """

    def __init__(self, model: ModelId, size_bytes: int, used_s: float) -> None:
        self.model = model
        self.bytes = size_bytes
        self.used_s = self.idle_s = used_s
        self.users = 0
        self.uses = 0
        self.waiters = 0
        self.pinned = False
        self.gpu_share = 1.0

    @property
    def locked(self) -> bool:
        """In use or pinned: never a victim."""
        return self.users > 0 or self.pinned

    @property
    def kept(self) -> bool:
        """Locked, or waited for: evicted only where a local queue cannot move otherwise."""
        return self.users > 0 or self.pinned or self.waiters > 0


class GpuCache:
    """One GPU's memory; `residents` runs from the least to the most recently used.

    `contexts` are empty processes, by the models that left them: `used_bytes` counts them too.
    `withheld_bytes` belong to programs outside gpufaas, or to `shared` processes, by their tenants:
    they count as used, locked, kept, pinned.
    """

    def __init__(self, gpu: GpuId, node: NodeId, memory_bytes: int) -> None:
        self.id = gpu
        self.node = node
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        self.locked_bytes = 0
        self.kept_bytes = 0
        self.pinned_bytes = 0
        self.withheld_bytes = 0
        self.residents: dict[ModelId, ResidentModel] = {}
        self.contexts: dict[ModelId, KeptContext] = {}
        self.shared: dict[str, SharedProcess] = {}

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.used_bytes

    def fits(self, needs: Sequence[tuple[ModelId, int]], *, spare_waiting: bool = True) -> bool:
        """Whether the models could be resident together once everything evictable has left."""
        wanted = self.kept_bytes if spare_waiting else self.locked_bytes
        for model, size_bytes in needs:
            resident = self.residents.get(model)
            if resident is None:
                wanted += size_bytes
            elif not (resident.kept if spare_waiting else resident.locked):
                wanted += resident.bytes
        return wanted <= self.memory_bytes

    def could_fit(self, needs: Sequence[tuple[ModelId, int]]) -> bool:
        """Whether the models could be resident together if only pinned models had to stay."""
        wanted = self.pinned_bytes
        for model, size_bytes in needs:
            resident = self.residents.get(model)
            if resident is None or not resident.pinned:
                wanted += size_bytes
        return wanted <= self.memory_bytes


class IndexChanges:
    """GPUs with the models that changed there, and models whose stored weights changed."""

    def __init__(self) -> None:
        self.gpus: dict[GpuId, dict[ModelId, None]] = {}
        self.stored: dict[ModelId, None] = {}

    def note(self, gpu: GpuId, model: ModelId) -> None:
        """A model came to a GPU, left it, or has another size there."""
        models = self.gpus.get(gpu)
        if models is None:
            self.gpus[gpu] = {model: None}
        else:
            models[model] = None

    def note_gpu(self, gpu: GpuId) -> None:
        """A GPU came or left."""
        self.gpus.setdefault(gpu, {})


def context_for(
    cache: GpuCache, model: ModelId, taken: Collection[ModelId] = ()
) -> KeptContext | None:
    """The empty process that can take a model: the one that it left, or one of its tenant."""
    own = cache.contexts.get(model)
    if own is not None and model not in taken:
        return own
    tenant = tenant_of(model)
    for left, context in cache.contexts.items():
        if left not in taken and tenant_of(left) == tenant:
            return context
    return None


def idle_contexts(
    cache: GpuCache, short_bytes: int, taken: Collection[ModelId] = ()
) -> tuple[ModelId, ...]:
    """The empty processes that end first where memory is short, the oldest first; maybe too few."""
    chosen: list[ModelId] = []
    for left, context in cache.contexts.items():
        if short_bytes <= 0:
            break
        if context.bytes and left not in taken:
            chosen.append(left)
            short_bytes -= context.bytes
    return tuple(chosen)


def processes_for(cache: GpuCache, loads: Sequence[tuple[ModelId, int]]) -> dict[ModelId, ModelId]:
    """Which empty process takes which load: first every model's own, then those of its tenant."""
    processes: dict[ModelId, ModelId] = {m: m for m, _ in loads if m in cache.contexts}
    for model, _ in loads:
        if model not in processes:
            context = context_for(cache, model, processes.values())
            if context is not None:
                processes[model] = context.model
    return processes


def part_of(cache: GpuCache, model: ModelId) -> int:
    """A model's part of the memory of the process that it shares, equal for all models in it.

    Odd bytes belong to the first models, so that the parts are the whole.
    """
    process = process_of(cache, model)
    if process is None:
        return 0
    part_bytes, rest = divmod(process.bytes, len(process.models))
    return part_bytes + 1 if list(process.models).index(model) < rest else part_bytes


def process_of(cache: GpuCache, model: ModelId) -> SharedProcess | None:
    """The process that a model shares, or would share with further ones; None if it is alone."""
    process = cache.shared.get(tenant_of(model)) if cache.shared else None
    return process if process is not None and model in process.models else None


class CacheIndex:
    """Residents of every GPU, holders of every model, and the tiers on each node."""

    def __init__(self, rule: EvictionRule, *, spares_waiting: bool = True) -> None:
        """With `spares_waiting` off, what requests wait for is a victim like all else."""
        self.rule = rule
        self.gpus: dict[GpuId, GpuCache] = {}
        self.pinned_bytes = 0
        self.parts = MemoryParts()
        self.changes: IndexChanges | None = None
        self._spares_waiting = spares_waiting
        self._holders: dict[ModelId, dict[GpuId, GpuCache]] = {}
        # The GPUs that keep an empty process, by the model that left it.
        self.left: dict[ModelId, dict[GpuId, GpuCache]] = {}
        self.rates = RequestRates()
        self._tiers: dict[ModelId, dict[NodeId, Tier]] = {}
        self._times: dict[ModelId, tuple[float, float]] = {}

    def note_changes(self) -> IndexChanges:
        """Note from now on what changes, for somebody who counts memory over time."""
        changes = self.changes = IndexChanges()
        for gpu in self.gpus:
            changes.note_gpu(gpu)
        return changes

    # -- GPUs -----------------------------------------------------------------------------------

    def add_gpu(self, gpu: GpuId, node: NodeId, memory_bytes: int) -> GpuCache:
        cache = GpuCache(gpu, node, memory_bytes)
        self.parts.memory_bytes += memory_bytes
        self.gpus[gpu] = cache
        if self.changes is not None:
            self.changes.note_gpu(cache.id)
        return cache

    def remove_gpu(self, gpu: GpuId) -> None:
        cache = self.gpus[gpu]
        for model in list(cache.residents):
            self.evict(cache, model)
        for model in list(cache.contexts):
            self.drop_context(cache, model)
        self.withhold(cache, -cache.withheld_bytes)
        self.parts.memory_bytes -= cache.memory_bytes
        del self.gpus[gpu]
        if self.changes is not None:
            self.changes.note_gpu(cache.id)

    # -- questions ------------------------------------------------------------------------------

    def holders(self, model: ModelId) -> Mapping[GpuId, GpuCache]:
        """The GPUs that hold `model`, or are loading it."""
        return self._holders.get(model, _NO_HOLDERS)

    def tiers(self, model: ModelId) -> Mapping[NodeId, Tier]:
        """The tier of `model` below GPU memory, on each node that has its weights."""
        return self._tiers.get(model, _NO_TIERS)

    def copies(self, model: ModelId) -> int:
        return len(self._holders.get(model, _NO_HOLDERS))

    def held(self, models: Sequence[ModelId]) -> bool:
        """Whether some GPU holds all these models."""
        if len(models) == 1:
            return bool(self._holders.get(models[0]))
        rarest = min(models, key=self.copies)
        holders = self.holders(rarest).values()
        return any(all(model in cache.residents for model in models) for cache in holders)

    def held_models(self) -> Iterable[ModelId]:
        return (model for model, gpus in self._holders.items() if gpus)

    def rate(self, model: ModelId, now: float) -> float:
        return self.rates.rate(model, now)

    def load_s(self, model: ModelId) -> float:
        """The estimate of the time when `model` was last admitted."""
        return self._times.get(model, (0.0, 0.0))[0]

    def run_s(self, model: ModelId) -> float:
        """The estimate of the time when `model` was last admitted."""
        return self._times.get(model, (0.0, 0.0))[1]

    def is_near(self, node: NodeId, model: ModelId) -> bool:
        """Whether a GPU of this node holds the model, or an empty process that it left."""
        for caches in (self._holders.get(model), self.left.get(model)):
            if caches and any(cache.node == node for cache in caches.values()):
                return True
        return False

    def source(self, cache: GpuCache, model: ModelId) -> Tier:
        """The nearest tier below its memory from which this GPU can load a model."""
        tier = self.tier(cache.node, model)
        if tier is Tier.HOST and cache.contexts and context_for(cache, model) is not None:
            return Tier.CONTEXT
        return tier

    def tier(self, node: NodeId, model: ModelId) -> Tier:
        """The nearest tier below GPU memory in which this node has the model's weights."""
        return self._tiers.get(model, _NO_TIERS).get(node, Tier.ABSENT)

    def has(self, model: ModelId) -> bool:
        """Whether some node has the weights, in any tier."""
        return bool(self._holders.get(model)) or model in self._tiers

    def plan(
        self,
        cache: GpuCache,
        needs: Sequence[tuple[ModelId, int]],
        now: float,
        *,
        spare_waiting: bool = True,
    ) -> LoadPlan | None:
        """Algorithm 3: hit or miss, and the victims of a miss; None where it cannot fit now."""
        residents, short_bytes = cache.residents, cache.used_bytes - cache.memory_bytes
        lacking = []
        for need in needs:
            if need[0] not in residents:
                lacking.append(need)
                short_bytes += need[1]
        loads = tuple(lacking)
        emptied = _NONE_EMPTIED
        if cache.contexts and loads:
            emptied = processes_for(cache, loads)
            short_bytes -= sum(cache.contexts[left].bytes for left in emptied.values())
        if not loads or short_bytes <= 0:
            return LoadPlan(loads, (), emptied)
        ends: tuple[ModelId, ...] = ()
        if cache.contexts:
            ends = idle_contexts(cache, short_bytes, emptied.values())
            short_bytes -= sum(cache.contexts[left].bytes for left in ends)
            if short_bytes <= 0:
                return LoadPlan(loads, (), emptied, ends)
        keep = [model for model, _ in needs]
        victims = self.victims(cache, short_bytes, now, keep)
        if victims is None and not spare_waiting:
            victims = self.victims(cache, short_bytes, now, keep, spare_waiting=False)
        return None if victims is None else LoadPlan(loads, victims, emptied, ends)

    def victims(
        self,
        cache: GpuCache,
        short_bytes: int,
        now: float,
        keep: Sequence[ModelId] = (),
        *,
        spare_waiting: bool = True,
    ) -> tuple[ModelId, ...] | None:
        """The models whose leaving frees `short_bytes`, by the rule; None where none can."""
        chosen: list[ModelId] = []
        order = self.rule.order(cache, self, now)
        if self.parts.weights is not None:
            order = self.parts.over_first(order)
        for resident in order:
            entry = cache.residents[resident.model]
            if entry.model in keep or (entry.kept if spare_waiting else entry.locked):
                continue
            chosen.append(entry.model)
            short_bytes -= entry.bytes
            if short_bytes <= 0:
                return tuple(chosen)
        return None

    # -- changes --------------------------------------------------------------------------------

    def admit(
        self,
        cache: GpuCache,
        model: ModelId,
        size_bytes: int,
        now: float,
        times: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Reserve memory for a model, now the most recently used; `times` to load and to run it."""
        if model in cache.contexts:
            self.drop_context(cache, model)
        cache.residents[model] = ResidentModel(model, size_bytes, now)
        cache.used_bytes += size_bytes
        self._holders.setdefault(model, {})[cache.id] = cache
        self.parts.came(model, size_bytes)
        self._times[model] = times
        self._note(cache, model)
        assert cache.used_bytes <= cache.memory_bytes, f"{cache.id} is over its memory"

    def touch(self, cache: GpuCache, model: ModelId, now: float) -> None:
        residents = cache.residents
        resident = residents.pop(model)
        resident.used_s = now
        resident.uses += 1
        residents[model] = resident

    def use(self, cache: GpuCache, model: ModelId, users: int) -> None:
        """Count a lease that uses a resident model (+1), or one that has ended (-1)."""
        resident = cache.residents.get(model)
        if resident is None:  # its GPU manager reported it gone while the lease was in force
            return
        before = resident.users
        resident.users = after = max(0, before + users)
        if (before > 0) == (after > 0) or resident.pinned:
            return
        change_bytes = resident.bytes if after else -resident.bytes
        cache.locked_bytes += change_bytes
        if not resident.waiters:
            cache.kept_bytes += change_bytes

    def wait(self, cache: GpuCache, model: ModelId, waiters: int) -> None:
        """Count requests that wait for this model in the GPU's local queues, if it is resident."""
        resident = cache.residents.get(model)
        if resident is None or not self._spares_waiting:
            return
        before = resident.waiters
        resident.waiters = after = max(0, before + waiters)
        if (before > 0) != (after > 0) and not resident.locked:
            cache.kept_bytes += resident.bytes if after else -resident.bytes

    def pin(self, cache: GpuCache, model: ModelId, *, pinned: bool) -> None:
        resident = cache.residents[model]
        self._count(cache, resident, -resident.bytes)
        resident.pinned = pinned
        self._count(cache, resident, resident.bytes)

    def _count(self, cache: GpuCache, resident: ResidentModel, change_bytes: int) -> None:
        """A resident takes so many bytes more, of every kind that it is of."""
        cache.used_bytes += change_bytes
        if resident.locked:
            cache.locked_bytes += change_bytes
        if resident.kept:
            cache.kept_bytes += change_bytes
        if resident.pinned:
            cache.pinned_bytes += change_bytes
            self.pinned_bytes += change_bytes

    def withhold(self, cache: GpuCache, size_bytes: int) -> None:
        """Count free memory as unavailable (or, if negative, as free again)."""
        cache.withheld_bytes += size_bytes
        cache.used_bytes += size_bytes
        cache.locked_bytes += size_bytes
        cache.kept_bytes += size_bytes
        cache.pinned_bytes += size_bytes
        self.pinned_bytes += size_bytes

    def evict(self, cache: GpuCache, model: ModelId) -> None:
        resident = cache.residents.pop(model)
        self._count(cache, resident, -resident.bytes)
        del self._holders[model][cache.id]
        self.parts.left(model, resident.bytes)
        process = process_of(cache, model)
        if process is not None:  # without a last model it has none until it is reported
            del process.models[model]
            self._note_shared(cache)
        self._note(cache, model)

    def keep_context(self, cache: GpuCache, model: ModelId, size_bytes: int, now: float) -> None:
        """A model has left a GPU, and an empty process there."""
        cache.contexts[model] = KeptContext(model, size_bytes, now)
        self.left.setdefault(model, {})[cache.id] = cache
        cache.used_bytes += size_bytes
        self._note(cache, model)
        assert cache.used_bytes <= cache.memory_bytes, f"{cache.id} is over its memory"

    def drop_context(self, cache: GpuCache, model: ModelId) -> None:
        """The empty process that a model left has ended, or is taken by another one."""
        cache.used_bytes -= cache.contexts.pop(model).bytes
        left = self.left[model]
        del left[cache.id]
        if not left:
            del self.left[model]
        self._note(cache, model)

    def resize_context(self, cache: GpuCache, model: ModelId, size_bytes: int) -> bool:
        """Correct an empty process's size; False if the GPU has no memory for it."""
        context = cache.contexts[model]
        grown_bytes = size_bytes - context.bytes
        if grown_bytes > cache.free_bytes:
            return False
        context.bytes += grown_bytes
        cache.used_bytes += grown_bytes
        self._note(cache, model)
        return True

    def resize(self, cache: GpuCache, model: ModelId, size_bytes: int) -> None:
        """Correct a resident's size to the measured size, within the memory that the GPU has."""
        resident = cache.residents[model]
        grown_bytes = min(size_bytes - resident.bytes, cache.free_bytes)
        resident.bytes += grown_bytes
        self.parts.grew(model, grown_bytes)
        self._note(cache, model)
        self._count(cache, resident, grown_bytes)

    def replace_tiers(self, node: NodeId, tiers: Mapping[ModelId, Tier]) -> None:
        """Replace everything recorded of a node's store by its report."""
        for model in [model for model, nodes in self._tiers.items() if node in nodes]:
            self.set_tier(node, model, Tier.ABSENT)
        for model, tier in tiers.items():
            self.set_tier(node, model, tier)

    def set_tier(self, node: NodeId, model: ModelId, tier: Tier) -> None:
        nodes = self._tiers.setdefault(model, {})
        nodes[node] = tier
        if tier is Tier.ABSENT:
            del nodes[node]
            if not nodes:
                del self._tiers[model]
        self.note_stored(model)

    def note_stored(self, model: ModelId) -> None:
        if self.changes is not None:
            self.changes.stored[model] = None

    # -- processes that models share ------------------------------------------------------------

    def replace_shared(
        self, cache: GpuCache, processes: Sequence[tuple[int, Sequence[ModelId]]]
    ) -> None:
        """A node reports the memory of its shared processes, and the models in each."""
        self._note_shared(cache)
        cache.shared.clear()
        for size_bytes, models in processes:
            there = [model for model in models if model in cache.residents]
            if there:
                cache.shared[tenant_of(there[0])] = SharedProcess(size_bytes, there)
        self._note_shared(cache)

    def share(self, cache: GpuCache, model: ModelId) -> None:
        """A resident model is in its tenant's shared process, if that is known."""
        process = cache.shared.get(tenant_of(model))
        if process is not None and model in cache.residents:
            process.models[model] = None
            self._note_shared(cache)

    # -- for who counts memory over time --------------------------------------------------------

    def _note_shared(self, cache: GpuCache) -> None:
        """What these models' parts are has changed."""
        for process in cache.shared.values():
            for model in process.models:
                self._note(cache, model)

    def _note(self, cache: GpuCache, model: ModelId) -> None:
        if self.changes is not None:
            self.changes.note(cache.id, model)

    def forget(self, model: ModelId) -> None:
        """Forget what is remembered of a model that no node has."""
        self._holders.pop(model, None)
        self._times.pop(model, None)
        self.rates.forget(model)


_NO_TIERS: dict[NodeId, Tier] = {}
_NO_HOLDERS: dict[GpuId, GpuCache] = {}


_USUAL = 1.0


class MemoryParts:
    """Counts the tenants' bytes; with `weights` each has a part of all memory by its weight.

    Then models of tenants that have more than their part leave before those of others, in the
    order of the eviction rule. Tenants whose weight is not named have the usual one.
    """

    def __init__(self) -> None:
        self.memory_bytes = 0
        self.weights: Mapping[str, float] | None = None
        self._bytes: dict[str, int] = {}
        self._models: dict[str, dict[ModelId, int]] = {}
        self._weight = 0.0

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share memory by these weights from now on; None: not at all."""
        self.weights = weights
        self._weight = sum(self._weight_of(tenant) for tenant in self._models)

    def models_of(self, tenant: str) -> Iterable[ModelId]:
        return self._models.get(tenant, _NO_MODELS)

    def came(self, model: ModelId, size_bytes: int) -> None:
        tenant = _tenant(model)
        models = self._models.get(tenant)
        if models is None:
            models = self._models[tenant] = {}
            self._bytes[tenant] = 0
            self._weight += self._weight_of(tenant)
        models[model] = models.get(model, 0) + 1
        self._bytes[tenant] += size_bytes

    def left(self, model: ModelId, size_bytes: int) -> None:
        tenant = _tenant(model)
        models = self._models[tenant]
        self._bytes[tenant] -= size_bytes
        models[model] -= 1
        if not models[model]:
            del models[model]
        if not models:
            del self._models[tenant], self._bytes[tenant]
            self._weight = self._weight - self._weight_of(tenant) if self._models else 0.0

    def grew(self, model: ModelId, grown_bytes: int) -> None:
        self._bytes[_tenant(model)] += grown_bytes

    def over_first(self, order: Iterable[ResidentView]) -> list[ResidentView]:
        """The same residents, those of tenants with more than their part first."""
        first: list[ResidentView] = []
        others: list[ResidentView] = []
        for resident in order:
            (first if self._is_over(_tenant(resident.model)) else others).append(resident)
        return first + others

    def _is_over(self, tenant: str) -> bool:
        part = self._weight_of(tenant) / self._weight if self._weight else 0.0
        return self._bytes.get(tenant, 0) > part * self.memory_bytes

    def _weight_of(self, tenant: str) -> float:
        return _USUAL if self.weights is None else self.weights.get(tenant, _USUAL)


def _tenant(model: ModelId) -> str:
    """Whose a model is; models that name no tenant are together those of one without a name."""
    return model.rpartition("/")[0]


_NO_MODELS: dict[ModelId, int] = {}
