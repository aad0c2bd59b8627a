"""The scheduler's interface for other folders: values, events, orders, errors and two protocols."""

from dataclasses import dataclass
from typing import Protocol

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.estimates.resource_metrics import METRICS
from scheduler.model.actions import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    Order,
    Prepare,
)
from scheduler.model.errors import (
    BadToken,
    BadValue,
    EventRefused,
    GivenBack,
    ModelsTooLarge,
    OverQuota,
    QueueFull,
    RequestEnded,
    RequestExpired,
    RequestFailed,
    RequestWithdrawn,
    SchedulerError,
)
from scheduler.model.events import (
    ContextKept,
    Event,
    GpuDraining,
    GpuJoined,
    GpuLost,
    GpuSnapshot,
    LeaseComputed,
    LeaseReleased,
    LeaseUsed,
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
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import (
    AfterLoss,
    CallEnd,
    Configuration,
    Estimate,
    GpuSpec,
    LeaseId,
    LeaseUse,
    ModelLoad,
    ModelSpec,
    Placement,
    Request,
    RequestId,
    RequestOutcome,
    SlotId,
    SlotSpec,
    StandingTerms,
)
from scheduler.wire.cluster_status import (
    DecisionCounts,
    GpuStatus,
    LeaseStatus,
    ResidentStatus,
    SlotStatus,
    Status,
)
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens, addresses_for_token
from scheduler.wire.node_link import NodeLink, hand_over, placement_of

__all__ = [
    "METRICS",
    "AcquireAnswer",
    "AcquireEnded",
    "Acquired",
    "AfterLoss",
    "BadToken",
    "BadValue",
    "CallEnd",
    "Configuration",
    "ContextKept",
    "DecisionCounts",
    "Demote",
    "DemoteStored",
    "Dispatch",
    "EndContext",
    "EndLease",
    "Estimate",
    "Event",
    "EventRefused",
    "GivenBack",
    "GpuDraining",
    "GpuId",
    "GpuJoined",
    "GpuLost",
    "GpuSnapshot",
    "GpuSpec",
    "GpuStatus",
    "LeaseClaims",
    "LeaseComputed",
    "LeaseId",
    "LeaseReleased",
    "LeaseStatus",
    "LeaseTokens",
    "LeaseUse",
    "LeaseUsed",
    "LiveLease",
    "LoadFailed",
    "MemoryPressure",
    "ModelDemoted",
    "ModelId",
    "ModelLoad",
    "ModelLoaded",
    "ModelRegistered",
    "ModelSpec",
    "ModelsTooLarge",
    "NodeId",
    "NodeLink",
    "NodeReports",
    "NodeSnapshot",
    "Order",
    "OverQuota",
    "OwnerTerms",
    "Placement",
    "Prepare",
    "QueueFull",
    "Request",
    "RequestCancelled",
    "RequestEnded",
    "RequestExpired",
    "RequestFailed",
    "RequestId",
    "RequestOutcome",
    "RequestWithdrawn",
    "ResidentStatus",
    "RunFailed",
    "RunFinished",
    "SchedulerError",
    "SlotFreed",
    "SlotId",
    "SlotSpec",
    "SlotStatus",
    "StandingTerms",
    "Status",
    "Tier",
    "addresses_for_token",
    "hand_over",
    "placement_of",
]


class NodeReports(Protocol):
    """Where a GPU manager reports what happened.

    Every load is reported as done or failed, also after its lease has ended, unless the model was
    ordered to leave before.
    """

    def report(self, event: Event) -> None:
        """Take one event in; the orders that follow may be given before this call returns."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """The request holds a lease."""

    request: RequestId
    placement: Placement


@dataclass(frozen=True, slots=True)
class AcquireEnded:
    """The request has ended and will get no further lease; a quota may have room in `again_s`."""

    request: RequestId
    outcome: RequestOutcome
    reason: str
    again_s: float | None = None


# The one answer to a caller that waits for a GPU.
AcquireAnswer = Acquired | AcquireEnded
