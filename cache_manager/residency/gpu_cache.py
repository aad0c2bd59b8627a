"""What one GPU's memory holds: models, and the empty processes that models left."""

from collections.abc import Collection, Iterable, Sequence

from cache_manager.model.ids import GpuId, ModelId, NodeId, tenant_of


class KeptContext:
    """An empty process that a model left on a GPU, for the next model of the same tenant."""

    __slots__ = ("bytes", "model", "since_s")

    def __init__(self, model: ModelId, size_bytes: int, since_s: float) -> None:
        self.model = model
        self.bytes = size_bytes
        self.since_s = since_s


class SharedProcess:
    """A process with several models of one tenant, whose memory belongs to none of them alone."""

    __slots__ = ("bytes", "models")

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


class IndexChanges:
    """GPUs with the models that changed there, and models whose stored weights changed."""

    __slots__ = ("gpus", "stored")

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


def replace_shared(
    cache: GpuCache,
    processes: Sequence[tuple[int, Sequence[ModelId]]],
    changes: IndexChanges | None,
) -> None:
    """A node reports the memory of its shared processes, and the models in each."""
    _note(cache, changes)
    cache.shared.clear()
    for size_bytes, models in processes:
        there = [model for model in models if model in cache.residents]
        if there:
            cache.shared[tenant_of(there[0])] = SharedProcess(size_bytes, there)
    _note(cache, changes)


def join(cache: GpuCache, model: ModelId, changes: IndexChanges | None) -> None:
    """A resident model is in its tenant's shared process, if that is known."""
    process = cache.shared.get(tenant_of(model))
    if process is not None and model in cache.residents:
        process.models[model] = None
        _note(cache, changes)


def leave(cache: GpuCache, model: ModelId, changes: IndexChanges | None) -> None:
    """A model has left its GPU; the process of a last one has no models until it is reported."""
    process = cache.shared.get(tenant_of(model))
    if process is not None and model in process.models:
        del process.models[model]
        _note(cache, changes)


def _note(cache: GpuCache, changes: IndexChanges | None) -> None:
    """What these models' parts are has changed, for who counts memory over time."""
    if changes is not None:
        for process in cache.shared.values():
            for model in process.models:
                changes.note(cache.id, model)
