"""The port to one node: the orders that its GPU manager takes, in this process or elsewhere."""

from typing import Protocol

from scheduler.model.actions import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    Order,
    Prepare,
)
from scheduler.model.events import LiveLease
from scheduler.model.values import Placement


class NodeLink(Protocol):
    """The orders that one node's GPU manager takes.

    No order waits: the node notes it, returns, and reports the result later. An order may arrive
    while the node is inside one of its own reports. A link that raises has lost its node.
    """

    def prepare(self, order: Prepare) -> None:
        """Evict the victims, then load; a prefetch ends its lease itself when it has loaded."""

    def grant(self, order: Dispatch) -> None:
        """A lease is in force; sent for hits and misses, before or after the lease's prepare.

        The order may be repeated for a lease in force, and changes nothing then.
        """

    def demote(self, order: Demote) -> None:
        """Evict this model from this GPU.

        `ModelDemoted` answers, or `ContextKept` if the process is to be kept and is; if it cannot
        be kept, `ModelDemoted` names the GPU.
        """

    def end_context(self, order: EndContext) -> None:
        """End the empty process that this model left on this GPU, if it is there."""

    def demote_stored(self, order: DemoteStored) -> None:
        """Move these weights down a tier, unless something uses them; report where they are."""

    def end_lease(self, order: EndLease) -> None:
        """Admit no further call, let the one in flight end, then report the slot as freed."""

    def contended(self, *, waiting: bool) -> None:
        """A hint whether requests wait for a GPU, so that lingering leases should end soon.

        Sent on every change, and repeated while requests wait.
        """


def hand_over(link: NodeLink, order: Order) -> None:
    if isinstance(order, Dispatch):
        link.grant(order)
    elif isinstance(order, Prepare):
        link.prepare(order)
    elif isinstance(order, EndLease):
        link.end_lease(order)
    elif isinstance(order, Demote):
        link.demote(order)
    elif isinstance(order, EndContext):
        link.end_context(order)
    else:
        link.demote_stored(order)


def live_lease_of(order: Dispatch) -> LiveLease:
    """Return a lease as its node reports it while it is in force."""
    return LiveLease(
        order.lease,
        order.slot,
        order.models,
        order.requests,
        order.more_slots,
        order.configuration,
        order.own,
    )


def placement_of(order: Dispatch) -> Placement:
    """Return what each caller of a granted lease gets."""
    return Placement(
        lease=order.lease,
        gpu=order.gpu,
        node=order.node,
        slot=order.slot,
        models=order.models,
        hit=order.hit,
        estimate=order.estimate,
        stands=order.stands,
    )
