"""All events of the core; a recorded list of these replays to the same actions."""

from collections.abc import Mapping
from types import MappingProxyType

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import (
    AfterLoss,
    CallEnd,
    Configuration,
    Few,
    GpuSpec,
    LeaseId,
    LeaseUse,
    Many,
    Message,
    ModelSpec,
    Number,
    Request,
    RequestId,
    SlotId,
    Value,
)

# -- requests -----------------------------------------------------------------------------------


class RequestArrived(Message, frozen=True):
    """A request; one with the id of a waiting request changes nothing: acquire is idempotent."""

    request: Request


class RequestCancelled(Message, frozen=True):
    """The caller went away; the request may be anywhere."""

    request: RequestId


class DeadlinePassed(Message, frozen=True):
    """The request's deadline has passed; `deadline_s` identifies the deadline."""

    request: RequestId
    deadline_s: Number | None = None


# -- GPUs ---------------------------------------------------------------------------------------


class GpuJoined(Message, frozen=True):
    """A GPU joined, empty."""

    gpu: GpuSpec


class GpuDraining(Message, frozen=True):
    """The GPU takes no new request; work in flight there may end."""

    gpu: GpuId


class GpuLost(Message, frozen=True):
    """A GPU is gone with everything on it."""

    gpu: GpuId
    running: AfterLoss = AfterLoss.FAIL


class NodeSilent(Message, frozen=True):
    """The stream of a node is broken: its GPUs take nothing new until it resumes or is given up."""

    node: NodeId


class NodeHeard(Message, frozen=True):
    """The stream of a silent node has resumed; a snapshot of the node means the same."""

    node: NodeId


class LiveLease(Value, frozen=True):
    """A lease that a GPU manager reports as in force, and what it was given for and with."""

    lease: LeaseId
    slot: SlotId
    models: Many[ModelId]
    requests: Many[RequestId] = ()
    more_slots: Many[SlotId] = ()
    configuration: Configuration | None = None
    own: bool = False


class GpuSnapshot(Value, frozen=True):
    """One GPU as its manager sees it.

    Residents run from the least to the most recently used, models that are being loaded included.
    `contexts` are the empty processes that models left, and their memory. No model can have that of
    `shared` processes, which counts beside that of the models in them. `loading` are the residents
    that are not there yet, `stuck` those of them whose loads make no progress, and for how many
    seconds. `gpu_shares` names those whose calls have only a part of the GPU's
    multiprocessors. A `draining` GPU takes nothing new, as after `GpuDraining`; one that is not may
    be that of a manager that has taken the place of one that drained.
    """

    gpu: GpuSpec
    residents: Many[tuple[ModelId, int]] = ()
    leases: Many[LiveLease] = ()
    contexts: Many[tuple[ModelId, int]] = ()
    shared: Many[tuple[int, Many[ModelId]]] = ()
    loading: Many[ModelId] = ()
    gpu_shares: Many[tuple[ModelId, Number]] = ()
    draining: bool = False
    stuck: Many[tuple[ModelId, Number]] = ()

    @property
    def shared_bytes(self) -> int:
        """What shared processes take together, besides their models."""
        return sum(size_bytes for size_bytes, _ in self.shared)


class NodeSnapshot(Message, frozen=True):
    """A node's full state, on attaching: on residency and leases the manager is right."""

    node: NodeId
    gpus: Many[GpuSnapshot]
    stored: Many[tuple[ModelId, Tier]] = ()
    lost_leases: AfterLoss = AfterLoss.FAIL


class MemoryPressure(Message, frozen=True):
    """A GPU lacks this many bytes that the core counted on, until its next snapshot.

    `withheld_bytes` are taken by what is no model's: models leave only for what was not free.
    """

    gpu: GpuId
    short_bytes: int
    withheld_bytes: int = 0


# -- models -------------------------------------------------------------------------------------


class ModelRegistered(Message, frozen=True):
    """A model was declared, perhaps with its size and times."""

    model: ModelSpec


class ModelLoaded(Message, frozen=True):
    """A model is in GPU memory; the load is measured. It may share its process with others.

    Its calls have this share of the GPU's multiprocessors.
    """

    gpu: GpuId
    model: ModelId
    load_s: Number
    source: Tier
    memory_bytes: int | None = None
    shares: bool = False
    gpu_share: Number = 1.0


class LoadFailed(Message, frozen=True):
    """A model could not be loaded into GPU memory; `lease` is that of the order to load it."""

    gpu: GpuId
    model: ModelId
    reason: str
    waiting: AfterLoss = AfterLoss.FAIL
    lease: LeaseId | None = None


class ModelDemoted(Message, frozen=True):
    """A node now keeps the model in this tier; `gpu` names a GPU that lost it without an order.

    The answer to a Demote or a Prepare names no GPU: the core counted those victims as gone.
    """

    node: NodeId
    gpu: GpuId | None
    model: ModelId
    tier: Tier


class ContextKept(Message, frozen=True):
    """A model has left a GPU; its process stays there, empty, and needs this much memory."""

    gpu: GpuId
    model: ModelId
    memory_bytes: int


class StageDue(Message, frozen=True):
    """An idle model may step down: from a GPU, or without one from its node's store."""

    node: NodeId
    gpu: GpuId | None
    model: ModelId
    due_s: Number


# -- runs and leases ----------------------------------------------------------------------------


class RunFinished(Message, frozen=True):
    """One measured inference, of `batch`, perhaps in the configuration of its lease.

    Of calls that ran `together`, as one, `run_s` is the part of each.
    """

    slot: SlotId
    model: ModelId
    batch: int
    run_s: Number
    peak_bytes: int | None = None
    configuration: Configuration | None = None
    together: int = 1


class RunFailed(Message, frozen=True):
    """The GPU work of a lease failed; its slot is freed by a later report."""

    lease: LeaseId
    reason: str
    requests: AfterLoss = AfterLoss.FAIL


class LeaseReleased(Message, frozen=True):
    """The holder no longer needs the lease; with `may_return` it may need another one later.

    Of a lease that several requests have, only the named `request` gives it back; without a name
    all of them do.
    """

    lease: LeaseId
    may_return: bool = False
    request: RequestId | None = None


class LeaseWanted(Message, frozen=True):
    """A request that gave its lease back early asks for another one: to the queue's front."""

    request: RequestId


class LeaseUsed(Message, frozen=True):
    """The caller that keeps a lease reports its calls: new ones, and ends of those known to run."""

    lease: LeaseId
    function: str
    uses: Few[LeaseUse] = ()
    ends: Few[CallEnd] = ()
    batch: int = 1


class LeaseComputed(Message, frozen=True):
    """Under a lease of a function's own process calls ran for so long since the last report.

    A call that still runs counts up to now.
    """

    lease: LeaseId
    computed_s: Number


class RecallPassed(Message, frozen=True):
    """The time has passed that the caller of a recalled lease has to give it back."""

    lease: LeaseId


class SlotFreed(Message, frozen=True):
    """The GPU manager has ended a lease. Nothing else makes a slot idle."""

    slot: SlotId
    lease: LeaseId


# -- administration -----------------------------------------------------------------------------


class PinAsked(Message, frozen=True):
    """Keep a model on one GPU (loading it if needed), or wherever it is now."""

    model: ModelId
    gpu: GpuId | None = None


class UnpinAsked(Message, frozen=True):
    """Let a pinned model be evicted again, on one GPU or everywhere."""

    model: ModelId
    gpu: GpuId | None = None


class PrefetchAsked(Message, frozen=True):
    """Load a model ahead of its requests, onto one idle GPU or the least used one that has room."""

    model: ModelId
    gpu: GpuId | None = None


class EvictAsked(Message, frozen=True):
    """Take a model out of the memory of one GPU, or of every GPU, where it is not in use."""

    model: ModelId
    gpu: GpuId | None = None


class PolicySet(Message, frozen=True):
    """Decide by this policy from now on; every waiting request stays waiting."""

    policy: str
    parameters: Mapping[str, Number] = MappingProxyType({})


class TermsSet(Message, frozen=True):
    """From now on these terms hold for an owner; None: no terms of its own.

    An owner is a namespace, or a function of it (`namespace/function`), as requests name it.
    """

    owner: str
    terms: OwnerTerms | None


class LeaseIdsRaised(Message, frozen=True):
    """The leader's term has risen: leases that are given from now on have ids from `first`."""

    first: LeaseId


class TimerFired(Message, frozen=True):
    """The policy asked to be run again at this time."""


Event = (
    RequestArrived
    | RequestCancelled
    | DeadlinePassed
    | GpuJoined
    | GpuDraining
    | GpuLost
    | NodeSilent
    | NodeHeard
    | NodeSnapshot
    | MemoryPressure
    | ModelRegistered
    | ModelLoaded
    | LoadFailed
    | ModelDemoted
    | ContextKept
    | StageDue
    | RunFinished
    | RunFailed
    | LeaseReleased
    | LeaseWanted
    | LeaseUsed
    | LeaseComputed
    | RecallPassed
    | SlotFreed
    | PinAsked
    | UnpinAsked
    | PrefetchAsked
    | EvictAsked
    | PolicySet
    | TermsSet
    | LeaseIdsRaised
    | TimerFired
)
