"""All actions that the core can return; its driver carries them out in order."""

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.model.events import Event
from scheduler.model.values import (
    Configuration,
    Estimate,
    Explanation,
    LeaseId,
    Many,
    Message,
    ModelLoad,
    Number,
    Request,
    RequestId,
    RequestOutcome,
    SlotId,
    StandingTerms,
)


class Prepare(Message, frozen=True):
    """To the GPU manager: evict the victims, then load; a prefetch has a lease of its own.

    `emptied` names models whose empty processes must end as well. Other leases of the slot may run
    while it loads `beside` them. `more_slots` and `configuration` are those of the Dispatch that
    follows.
    """

    slot: SlotId
    gpu: GpuId
    lease: LeaseId
    victims: Many[ModelId]
    loads: Many[ModelLoad]
    prefetch: bool = False
    emptied: Many[ModelId] = ()
    beside: bool = False
    more_slots: Many[SlotId] = ()
    configuration: Configuration | None = None


class Dispatch(Message, frozen=True):
    """To the callers and the GPU manager: these requests now hold this lease on these models.

    `function` is the one that a caller passes the lease on to; empty if nobody is between the
    scheduler and the session that asked, or if requests of several functions share the lease.
    The lease occupies `more_slots` of the same GPU as well, for its whole time; it is known, and
    freed, by `slot`. With a `configuration` it has so many virtual CPUs. It is `own` if all of its
    requests are: then it is claimed at once, or nobody is left who would.
    """

    lease: LeaseId
    slot: SlotId
    gpu: GpuId
    node: NodeId
    requests: Many[RequestId]
    hit: bool
    held_elsewhere: bool
    estimate: Estimate
    rule: str
    explanation: Explanation | None = None
    models: Many[ModelId] = ()
    stands: StandingTerms | None = None
    function: str = ""
    more_slots: Many[SlotId] = ()
    configuration: Configuration | None = None
    own: bool = False


class Taken(Message, frozen=True):
    """To observers: a call ran, or runs, under a lease that its caller kept.

    `dispatch` is what an own lease of the call would have been given by.
    """

    request: Request
    began_s: Number
    dispatch: Dispatch
    parent: str = ""


class Recall(Message, frozen=True):
    """To the caller that keeps this lease: begin no further call under it, and give it back."""

    lease: LeaseId


class EnqueueLocally(Message, frozen=True):
    """A request waits for one busy slot from now on."""

    request: RequestId
    slot: SlotId
    rule: str
    explanation: Explanation | None = None


class Demote(Message, frozen=True):
    """To the GPU manager: evict this model from this GPU.

    With `keeps_context` its process stays, empty, for the next model of the same tenant.
    """

    gpu: GpuId
    model: ModelId
    reason: str
    keeps_context: bool = False


class EndContext(Message, frozen=True):
    """To the GPU manager: end the empty process that this model left on this GPU."""

    gpu: GpuId
    model: ModelId
    reason: str


class DemoteStored(Message, frozen=True):
    """To the GPU manager: move these weights down to this tier, unless something needs them."""

    node: NodeId
    model: ModelId
    tier: Tier
    reason: str


class EndLease(Message, frozen=True):
    """To the GPU manager: admit no further call, let the one in flight end, report the slot.

    With `recalled` its holder may still be at work: the call in flight has as long as any call.
    """

    slot: SlotId
    lease: LeaseId
    reason: str
    recalled: bool = False


class Finish(Message, frozen=True):
    """To the caller: this request has ended for good, with this outcome.

    `at_s` is set if it ended before the core heard of it. A quota that refused it may have room in
    `again_s` seconds.
    """

    request: RequestId
    outcome: RequestOutcome
    reason: str = ""
    at_s: Number | None = None
    again_s: Number | None = None


class SetTimer(Message, frozen=True):
    """Report this event to the core at that time."""

    at_s: Number
    event: Event


class Refuse(Message, frozen=True):
    """An event that was refused, and why."""

    event: Event
    reason: str


# What a node's GPU manager carries out.
Order = Prepare | Dispatch | Demote | EndContext | DemoteStored | EndLease

Action = (
    Prepare
    | Dispatch
    | Taken
    | Recall
    | EnqueueLocally
    | Demote
    | EndContext
    | DemoteStored
    | EndLease
    | Finish
    | SetTimer
    | Refuse
)
