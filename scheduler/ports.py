"""What a driver of the core needs of the world: a clock, and a link to each node."""

from collections.abc import Callable
from typing import Protocol

from scheduler.actions import Demote, Dispatch, EndLease, Prepare


class Cancellable(Protocol):
    """Something that was set to happen later."""

    def cancel(self) -> None:
        """Let it not happen; harmless once it has."""
        ...


class Clock(Protocol):
    """Time that never goes back; its zero is anything, and no moment is before it."""

    def now_s(self) -> float:
        """Seconds since the clock's zero."""
        ...

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        """Call back at that time, or as soon as possible where it has passed; never at once."""
        ...


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
        """A hint: somebody waits for a GPU, so that leases which merely linger should end soon.

        Said when it changes, and again every now and then while it stays true.
        """
        ...
