"""The port to one node: the orders that its GPU manager takes, in this process or elsewhere."""

from typing import Protocol

from scheduler.model.actions import Demote, Dispatch, EndLease, Prepare


class NodeLink(Protocol):
    """The orders that one node's GPU manager takes.

    No order waits: the node notes it, returns, and reports later what came of it. An order may
    come while the node is inside one of its own reports. A link that raises has lost its node.
    """

    def prepare(self, order: Prepare) -> None:
        """Let the victims go, then load; a prefetch ends its lease itself when it has loaded."""
        ...

    def grant(self, order: Dispatch) -> None:
        """A lease is in force: said of hits and misses, before or after the lease's prepare.

        It may be said again of a lease that is in force already, and changes nothing then.
        """
        ...

    def demote(self, order: Demote) -> None:
        """This model leaves this GPU."""
        ...

    def end_lease(self, order: EndLease) -> None:
        """Admit no further call, let the one in flight end, then report the slot as freed."""
        ...

    def contended(self, *, waiting: bool) -> None:
        """A hint whether requests wait for a GPU, so that lingering leases should end soon.

        Sent on every change, and repeated while requests wait.
        """
        ...
