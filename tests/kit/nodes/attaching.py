"""Attaching emulated nodes to a scheduler in the same process."""

from collections.abc import Sequence
from typing import Protocol

from cache_manager.model.ids import NodeId
from scheduler.api import NodeReports
from scheduler.model.events import Event
from scheduler.service.driver import Driver
from scheduler.wire.node_link import NodeLink


class EmulatedLink(NodeLink, Protocol):
    """A node that takes orders and reports to the scheduler that it is attached to."""

    name: NodeId
    reports: NodeReports | None

    def whole_state(self) -> Sequence[Event]:
        """The reports of all that the node has, for a scheduler that knows nothing of it."""
        ...


def attach_in_process(driver: Driver, node: EmulatedLink) -> None:
    """Attach a node to a driver without a stream between them, and report what the node has."""
    node.reports = driver
    driver.attach(node.name, node)
    for event in node.whole_state():
        driver.report(event)
