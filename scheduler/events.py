"""Everything that can happen to the core; a recorded list of these replays to the same actions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cache_manager.model import GpuId, ModelId, NodeId, Tier
from scheduler.model import AfterLoss, GpuSpec, LeaseId, ModelSpec, Request, RequestId, SlotId

# -- requests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """Asking again with the same id changes nothing: acquire is idempotent."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller went away; the request may be anywhere."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time until which the caller would wait is over."""

    request: RequestId


# -- GPUs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuJoined:
    """A GPU is there, empty."""

    gpu: GpuSpec


@dataclass(frozen=True, slots=True)
class GpuDraining:
    """Takes no new request; what runs there ends in peace."""

    gpu: GpuId


@dataclass(frozen=True, slots=True)
class GpuLost:
    """A GPU is gone, and all that was on it."""

    gpu: GpuId
    running: AfterLoss = AfterLoss.FAIL


@dataclass(frozen=True, slots=True)
class LiveLease:
    """A lease that a GPU manager says is in force."""

    lease: LeaseId
    slot: SlotId
    models: tuple[ModelId, ...]


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """One GPU as its manager sees it; residents run from the least to the most recently used."""

    gpu: GpuSpec
    residents: tuple[tuple[ModelId, int], ...] = ()
    leases: tuple[LiveLease, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node's whole truth, on attaching: on residency and leases the manager wins."""

    node: NodeId
    gpus: tuple[GpuSnapshot, ...]
    stored: tuple[tuple[ModelId, Tier], ...] = ()
    lost_leases: AfterLoss = AfterLoss.FAIL


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """A GPU lacks this many bytes that the core believed to be there."""

    gpu: GpuId
    short_bytes: int


# -- models -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelRegistered:
    """A model was declared, perhaps with its size and times."""

    model: ModelSpec


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """A model is in GPU memory; the load is measured."""

    gpu: GpuId
    model: ModelId
    load_s: float
    source: Tier
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A model could not be brought into GPU memory."""

    gpu: GpuId
    model: ModelId
    reason: str
    waiting: AfterLoss = AfterLoss.FAIL


@dataclass(frozen=True, slots=True)
class ModelDemoted:
    """A node keeps the model in this tier now; on a GPU it is no longer."""

    node: NodeId
    gpu: GpuId | None
    model: ModelId
    tier: Tier


# -- runs and leases ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunFinished:
    """One measured inference."""

    slot: SlotId
    model: ModelId
    batch: int
    run_s: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RunFailed:
    """The GPU work of a lease failed; its slot is freed by a later report."""

    lease: LeaseId
    reason: str
    requests: AfterLoss = AfterLoss.FAIL


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """The holder needs the GPU no more; with `may_return` it may want it again."""

    lease: LeaseId
    may_return: bool = False


@dataclass(frozen=True, slots=True)
class LeaseWanted:
    """A request that gave its lease back early calls the GPU again: to the queue's front."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """The GPU manager has ended a lease; nothing else makes a slot idle."""

    slot: SlotId
    lease: LeaseId


# -- administration -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PinAsked:
    """Keep a model on one GPU (loading it if need be), or wherever it is now."""

    model: ModelId
    gpu: GpuId | None = None


@dataclass(frozen=True, slots=True)
class UnpinAsked:
    """Let a pinned model be evicted again, on one GPU or everywhere."""

    model: ModelId
    gpu: GpuId | None = None


@dataclass(frozen=True, slots=True)
class PrefetchAsked:
    """Load a model ahead of its requests, onto one idle GPU or the least used one that has room."""

    model: ModelId
    gpu: GpuId | None = None


@dataclass(frozen=True, slots=True)
class EvictAsked:
    """Take a model out of the memory of one GPU, or of every GPU, where it is not in use."""

    model: ModelId
    gpu: GpuId | None = None


@dataclass(frozen=True, slots=True)
class PolicySet:
    """Decide by this policy from now on; every waiting request stays waiting."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The policy asked to be run again at this time."""


Event = (
    RequestArrived
    | RequestCancelled
    | DeadlinePassed
    | GpuJoined
    | GpuDraining
    | GpuLost
    | NodeSnapshot
    | MemoryPressure
    | ModelRegistered
    | ModelLoaded
    | LoadFailed
    | ModelDemoted
    | RunFinished
    | RunFailed
    | LeaseReleased
    | LeaseWanted
    | SlotFreed
    | PinAsked
    | UnpinAsked
    | PrefetchAsked
    | EvictAsked
    | PolicySet
    | TimerFired
)
