"""What other folders may use of the scheduler: its values, its events, orders and two protocols."""

from dataclasses import dataclass
from typing import Protocol

from cache_manager.model import GpuId, ModelId, NodeId, Tier
from scheduler.about import About, Work
from scheduler.actions import Demote, Dispatch, EndLease, Prepare
from scheduler.errors import (
    BadToken,
    BadValue,
    Cancelled,
    Expired,
    Failed,
    GivenBack,
    QueueFull,
    Refused,
    RequestEnded,
    SchedulerError,
    TooLarge,
)
from scheduler.events import (
    Event,
    GpuDraining,
    GpuJoined,
    GpuLost,
    GpuSnapshot,
    LeaseReleased,
    LiveLease,
    LoadFailed,
    MemoryPressure,
    ModelDemoted,
    ModelLoaded,
    ModelRegistered,
    NodeSnapshot,
    RequestCancelled,
    RunFailed,
    RunFinished,
    SlotFreed,
)
from scheduler.leases import LeaseClaims, LeaseTokens, addresses_for_token
from scheduler.model import (
    AfterLoss,
    Estimate,
    GpuSpec,
    LeaseId,
    Load,
    ModelSpec,
    Outcome,
    Placement,
    Request,
    RequestId,
    SlotId,
    SlotSpec,
)
from scheduler.ports import Cancellable, Clock, NodeLink
from scheduler.status import (
    Counts,
    GpuStatus,
    LeaseStatus,
    ResidentStatus,
    SlotStatus,
    Status,
)
from scheduler.traces import (
    Attributes,
    Sink,
    Span,
    SpanKind,
    TraceContext,
    plain_span,
    trace_of,
)

__all__ = [
    "About",
    "Acquired",
    "AfterLoss",
    "Answer",
    "Attributes",
    "BadToken",
    "BadValue",
    "Cancellable",
    "Cancelled",
    "Clock",
    "Counts",
    "Demote",
    "Dispatch",
    "EndLease",
    "Ended",
    "Estimate",
    "Event",
    "Expired",
    "Failed",
    "GivenBack",
    "GpuDraining",
    "GpuId",
    "GpuJoined",
    "GpuLost",
    "GpuSnapshot",
    "GpuSpec",
    "GpuStatus",
    "LeaseClaims",
    "LeaseId",
    "LeaseReleased",
    "LeaseStatus",
    "LeaseTokens",
    "LiveLease",
    "Load",
    "LoadFailed",
    "MemoryPressure",
    "ModelDemoted",
    "ModelId",
    "ModelLoaded",
    "ModelRegistered",
    "ModelSpec",
    "NodeId",
    "NodeLink",
    "NodeSnapshot",
    "Outcome",
    "Placement",
    "Prepare",
    "QueueFull",
    "Refused",
    "Reports",
    "Request",
    "RequestCancelled",
    "RequestEnded",
    "RequestId",
    "ResidentStatus",
    "RunFailed",
    "RunFinished",
    "Scheduler",
    "SchedulerError",
    "Sink",
    "SlotFreed",
    "SlotId",
    "SlotSpec",
    "SlotStatus",
    "Span",
    "SpanKind",
    "Status",
    "Tier",
    "TooLarge",
    "TraceContext",
    "Work",
    "addresses_for_token",
    "plain_span",
    "trace_of",
]


class Reports(Protocol):
    """Where a GPU manager says what happened.

    Of a load it reports nothing once the model was told to leave, and else what came of it, also
    where its lease has ended meanwhile.
    """

    def report(self, event: Event) -> None:
        """Take one event in; orders that follow from it may be given before this returns."""
        ...


@dataclass(frozen=True, slots=True)
class Acquired:
    """The request holds a lease."""

    request: RequestId
    placement: Placement


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended and will be given no lease any more."""

    request: RequestId
    outcome: Outcome
    reason: str


# What a caller that waits for a GPU is told, once.
Answer = Acquired | Ended


class Scheduler(Protocol):
    """Where callers get GPU time; all times are seconds of the scheduler's clock."""

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease; asking again with the same id joins the first asking.

        Raises RequestEnded (QueueFull, TooLarge, Expired, Cancelled, Failed) where the request
        ends instead, Refused where it makes no sense. Cancelling the task cancels the request.
        """
        ...

    async def wanted(self, request: RequestId) -> Placement:
        """Wait for another lease after one that was released with `may_return`.

        The request goes to the front of the queue. Raises and is cancelled as `acquire` is.
        """
        ...

    def release(self, lease: LeaseId, *, may_return: bool = False) -> None:
        """The holder needs the GPU no more, or (with `may_return`) perhaps later again."""
        ...

    def cancel(self, request: RequestId) -> None:
        """The caller went away: the request ends, wherever it is; an ended one stays as it is."""
        ...
