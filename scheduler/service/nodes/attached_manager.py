"""One attached GPU manager: orders out and reports in, over one socket after another."""

import asyncio
from collections.abc import Callable
from logging import Logger

from cache_manager.model.ids import NodeId
from common.line import MessageLine
from scheduler.model.actions import Demote, Dispatch, EndLease, Prepare
from scheduler.model.errors import BadValue
from scheduler.model.events import Event, NodeHeard, NodeSilent, NodeSnapshot
from scheduler.service.driver.driver import Driver
from scheduler.service.nodes.node_calls import NodeCalls
from scheduler.wire.codec import Order
from scheduler.wire.node_stream import (
    Beat,
    Contended,
    Down,
    DownChannel,
    Given,
    Leave,
    Report,
    Resume,
    Superseded,
)
from scheduler.wire.snapshots import amended


class AttachedManager:
    """A NodeLink that outlives its socket; `run` is the life of the manager at the other end.

    Messages are kept while there is no socket, and sent over the next one.
    """

    def __init__(
        self,
        node: NodeId,
        run: str,
        driver: Driver,
        term: Callable[[], int],
        now_s: Callable[[], float],
        log: Logger,
        superseded: Callable[[int], None],
        addresses: Callable[[NodeId], tuple[str, ...]],
    ) -> None:
        self.node = node
        self.run = run
        self.left = False
        self.heard_s = 0.0
        self._driver = driver
        self._term = term
        self._log = log
        self._superseded = superseded
        self._channel = DownChannel()
        self._calls = NodeCalls(node, driver, now_s, self._say, addresses)
        self._line: MessageLine | None = None
        self._before: AttachedManager | None = None
        self._attached = False
        self._waiting = False
        self._silent = False
        self._grace: asyncio.TimerHandle | None = None

    # -- sockets --------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a socket leads to the manager."""
        return self._line is not None

    @property
    def seen(self) -> int:
        """The last message of the manager that was taken."""
        return self._channel.seen

    def unsent(self, resume: Resume) -> list[bytes] | None:
        """What a manager that comes back lacks; None where it has to begin anew."""
        if self._channel.overfull:
            return None
        try:
            return self._channel.again(resume.seen)
        except BadValue:
            return None

    def connect(self, line: MessageLine, unsent: list[bytes]) -> None:
        """Use this socket from now on, and no earlier one."""
        self.disconnect()
        if self._grace is not None:
            self._grace.cancel()
        self._line = line
        self.heard_s = asyncio.get_running_loop().time()
        for data in unsent:
            line.send(data)
        if self._waiting:
            self.contended(waiting=True)
        if self._silent:  # only now: what is decided next is said after what was kept
            self._silent = False
            self._driver.report(NodeHeard(self.node))

    def disconnect(self) -> None:
        """Hang the socket up, if there is one."""
        if self._line is not None:
            self._line.hang_up()
            self._line = None

    def broken(self, line: MessageLine, grace_s: float, over: Callable[[], None]) -> None:
        """This socket is gone: if it was the last, `over` is called unless another comes soon."""
        if self._line is line:
            self._line = None
            self._silent = self._attached
            self._driver.report(NodeSilent(self.node))
            self._grace = asyncio.get_running_loop().call_later(grace_s, over)

    def succeeds(self, before: "AttachedManager") -> None:
        """The manager begins anew: what came before ends when it has said what it holds.

        Until then it gets nothing new, also where the end of its last socket was not noticed yet.
        """
        self._before = before.heir()
        if before.connected:
            self._driver.report(NodeSilent(self.node))
        before.close()

    def heir(self) -> "AttachedManager | None":
        """Who may have been given orders that did not arrive: this, or what it succeeded."""
        return self if self._attached else self._before

    def ends(self) -> list[EndLease]:
        """Ends of leases that were ordered here, and perhaps never arrived."""
        inherited = [] if self._before is None else self._before.ends()
        orders = self._channel.unseen_orders()
        return inherited + [order for order in orders if isinstance(order, EndLease)]

    def close(self) -> None:
        """Send and receive nothing any more."""
        self.disconnect()
        self._calls.close()
        if self._grace is not None:
            self._grace.cancel()

    # -- orders of the driver -------------------------------------------------------------------

    def prepare(self, order: Prepare) -> None:
        self._give(order)

    def grant(self, order: Dispatch) -> None:
        self._give(order._replace(explanation=None))

    def demote(self, order: Demote) -> None:
        self._give(order)

    def end_lease(self, order: EndLease) -> None:
        self._give(order)

    def contended(self, *, waiting: bool) -> None:
        self._waiting = waiting
        if self._line is not None:
            self._line.send(self._channel.hint(Contended(waiting)))

    def beat(self) -> None:
        """Send a heartbeat; hang up on a manager that acknowledges nothing."""
        if self._line is not None:
            self._line.send(self._channel.hint(Beat()))
            if self._channel.overfull:
                self._log.warning("node %s does not keep up", self.node)
                self._line.hang_up()

    def _give(self, order: Order) -> None:
        self._say(Given(self._term(), order))

    def _say(self, message: Down) -> None:
        data = self._channel.say(message)
        if self._line is not None:
            self._line.send(data)

    # -- messages of the manager ------------------------------------------------------------------

    def heard(self, data: bytes) -> None:
        """Take messages in; BadValue where they are none."""
        for message in self._channel.hear(data):
            if isinstance(message, Report):
                self._report(message.event)
            elif isinstance(message, Leave):
                self.left = True
            elif isinstance(message, Superseded):
                self._superseded(message.term)
            elif not isinstance(message, Beat):
                self._calls.begin(message)

    def _report(self, event: Event) -> None:
        if not isinstance(event, NodeSnapshot):
            self._driver.report(event)
            return
        if event.node != self.node:
            raise BadValue(f"node {self.node} speaks for {event.node[:80]}")
        if not self._attached:
            self._attached = True
            self._driver.attach(self.node, self)
        self._driver.report(amended(event, self._channel.unseen_orders()))
        before, self._before = self._before, None
        for order in [] if before is None else before.ends():
            self.end_lease(order)
