"""The scheduler's interface for other folders: values, events, orders, errors and two protocols.

Its imports are what others may name.
"""

from typing import Protocol

from cache_manager.model.ids import GpuId, ModelId, NodeId
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
    METRICS,
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
    SlotId,
    SlotSpec,
    StandingTerms,
)
from scheduler.wire.cluster_status import (
    DecisionCounts,
    Status,
)
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens, addresses_for_token
from scheduler.wire.node_link import NodeLink, hand_over, live_lease_of, placement_of


class NodeReports(Protocol):
    """Where a GPU manager reports what happened.

    Every load is reported as done or failed, also after its lease has ended, unless the model was
    ordered to leave before.
    """

    def report(self, event: Event) -> None:
        """Take one event in; the orders that follow may be given before this call returns."""
