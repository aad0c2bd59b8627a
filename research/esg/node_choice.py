"""ESG_Dispatch (section 3.4): on which node, and in which configuration, requests run.

The paper says home invoker, warm invokers, cold ones. A home that has room but no idle instance
of the function is read as a cold one: there the stage would first wait seconds for its start.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler.model.values import Configuration


class NodeRoom(NamedTuple):
    """What is free on a node, and whether an idle instance of the stage's function is there."""

    vcpus: int
    vgpus: int
    is_warm: bool

    def fits(self, configuration: Configuration) -> bool:
        return configuration.vcpus <= self.vcpus and configuration.vgpus <= self.vgpus


class NodeChoice(NamedTuple):
    """A configuration and the node, by its place in the list, that has room for it."""

    configuration: Configuration
    node: int


def dispatch(
    configurations: Iterable[Configuration], nodes: Sequence[NodeRoom], preferred: int
) -> NodeChoice | None:
    """The first configuration that fits on any node, and where; None if none does."""
    for configuration in configurations:
        node = node_for(configuration, nodes, preferred)
        if node is not None:
            return NodeChoice(configuration, node)
    return None


def node_for(configuration: Configuration, nodes: Sequence[NodeRoom], preferred: int) -> int | None:
    """The preferred node, else the next warm one after it, else the cold one with most room."""
    coldest: int | None = None
    for step in range(len(nodes)):
        place = (preferred + step) % len(nodes)
        room = nodes[place]
        if not room.fits(configuration):
            continue
        if room.is_warm:
            return place
        if coldest is None or _free(room) > _free(nodes[coldest]):
            coldest = place
    return coldest


def _free(room: NodeRoom) -> tuple[int, int]:
    """GPU parts first: they are what is scarce."""
    return room.vgpus, room.vcpus
