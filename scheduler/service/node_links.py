"""The links to the nodes: orders go out, and a link that fails has lost its node."""

from logging import Logger

from cache_manager.model.ids import NodeId
from scheduler.model.actions import Demote, Dispatch, EndContext, EndLease, Order, Prepare
from scheduler.model.values import AfterLoss
from scheduler.wire.node_link import NodeLink


class NodeLinks:
    """One link for each attached node; `lost` holds nodes whose GPUs the core still counts on."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._links: dict[NodeId, NodeLink] = {}
        self.lost: dict[NodeId, AfterLoss] = {}

    def __contains__(self, node: NodeId) -> bool:
        return node in self._links

    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that are attached, in the order in which they attached."""
        return tuple(self._links)

    def attach(self, node: NodeId, link: NodeLink) -> None:
        self._links[node] = link

    def lose(self, node: NodeId, running: AfterLoss) -> None:
        """Send this node no more orders; `running` says what becomes of its leases' requests."""
        self._links.pop(node, None)
        self.lost.setdefault(node, running)

    def give(self, node: NodeId, order: Order) -> bool:
        """Hand one order over; False if the node is lost, also if the link fails now."""
        link = self._links.get(node)
        if link is None:
            self.lose(node, AfterLoss.FAIL)
            return False
        try:
            _hand_over(link, order)
        except Exception:  # noqa: BLE001 - a fault of one link must not stop the other nodes
            self._failed(node, order)
            return False
        return True

    def contended(self, *, waiting: bool) -> None:
        for node in self.nodes():
            self.contended_at(node, waiting=waiting)

    def contended_at(self, node: NodeId, *, waiting: bool) -> None:
        link = self._links.get(node)
        if link is None:  # it was lost while other nodes were notified
            return
        try:
            link.contended(waiting=waiting)
        except Exception:  # noqa: BLE001 - as above
            self._failed(node, "contended")

    def _failed(self, node: NodeId, order: object) -> None:
        self._log.exception("node %s is lost: its link failed at %s", node, order)
        self.lose(node, AfterLoss.FAIL)


def _hand_over(link: NodeLink, order: Order) -> None:
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
