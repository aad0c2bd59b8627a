"""The status of a scheduler: GPUs, residents, leases, queues and counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler.model.values import Configuration, LeaseId, RequestId, RequestOutcome, SlotId


@dataclass(frozen=True, slots=True)
class ResidentStatus:
    """One model in one GPU's memory; `used_s` is when a request last used it.

    It may leave at `leaves_s` if nobody uses it until then; None: in use, or for ever. Its
    `runtime` (None before a model that loads has a process) hosts as many models in its process,
    and its calls have this share of the GPU's multiprocessors.
    """

    model: ModelId
    memory_bytes: int
    used_s: float
    leases: int
    waiting: int
    pinned: bool
    leaves_s: float | None = None
    runtime: str | None = "process"
    process_models: int = 1
    gpu_share: float = 1.0


@dataclass(frozen=True, slots=True)
class ContextStatus:
    """An empty process that a model left on a GPU, and when it may end; None: for ever."""

    model: ModelId
    memory_bytes: int
    leaves_s: float | None = None


@dataclass(frozen=True, slots=True)
class ConfigurationStatus:
    """For how many requests together a lease was given, on how many virtual CPUs and slots."""

    batch: int
    vcpus: int
    vgpus: int


def configuration_status(configuration: Configuration | None) -> ConfigurationStatus | None:
    return None if configuration is None else ConfigurationStatus(*configuration)


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """One lease in force; if `released`, only its node's report is still to come.

    It occupies `more_slots` of the GPU beside the slot that lists it.
    """

    id: LeaseId
    models: tuple[ModelId, ...]
    requests: tuple[RequestId, ...]
    loading: tuple[ModelId, ...]
    released: bool
    more_slots: tuple[SlotId, ...] = ()
    configuration: ConfigurationStatus | None = None


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot: how many leases it can hold, those it holds, and its local queue in order."""

    id: SlotId
    capacity: int
    leases: tuple[LeaseStatus, ...]
    queue: tuple[RequestId, ...]
    given: int


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """One GPU; its residents run from the least to the most recently used.

    `withheld_bytes` were reported as used by other programs; they are part of `used_bytes`. A
    `silent` GPU takes nothing new until its node's stream is restored.
    """

    id: GpuId
    node: NodeId
    gpu_type: str
    memory_bytes: int
    used_bytes: int
    withheld_bytes: int
    draining: bool
    residents: tuple[ResidentStatus, ...]
    slots: tuple[SlotStatus, ...]
    silent: bool = False
    contexts: tuple[ContextStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class DecisionCounts:
    """Counts of the decisions since the start; a request is a hit if it had to load nothing."""

    hits: int = 0
    misses: int = 0
    false_misses: int = 0  # another GPU held what had to be loaded
    evictions: int = 0
    prefetches: int = 0
    refusals: int = 0
    finished: Mapping[RequestOutcome, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """The scheduler at one moment; `waiting` requests are in the global queue."""

    now_s: float
    policy: str
    gpus: tuple[GpuStatus, ...]
    nodes: tuple[NodeId, ...]
    waiting: int
    waiting_locally: int
    counts: DecisionCounts
