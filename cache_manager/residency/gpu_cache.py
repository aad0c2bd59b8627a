"""What one GPU's memory holds: models, and the empty processes that models left."""

from collections.abc import Iterable

from cache_manager.model.ids import GpuId, ModelId, NodeId


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

    __slots__ = (
        "bytes",
        "gpu_share",
        "idle_s",
        "model",
        "pinned",
        "used_s",
        "users",
        "uses",
        "waiters",
    )

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

    __slots__ = (
        "contexts",
        "id",
        "kept_bytes",
        "locked_bytes",
        "memory_bytes",
        "node",
        "pinned_bytes",
        "residents",
        "shared",
        "used_bytes",
        "withheld_bytes",
    )

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
