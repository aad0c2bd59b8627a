"""The addresses of other nodes on which requests were placed; pure."""

from cache_manager.model.ids import NodeId

MOST_NODES = 4_096


class NodeAddresses:
    """The addresses of the nodes that were named last: nobody says that a node is gone."""

    def __init__(self) -> None:
        self._addresses: dict[NodeId, tuple[str, ...]] = {}

    def of(self, node: NodeId) -> tuple[str, ...]:
        """The addresses of a node; none if it was not named lately."""
        return self._addresses.get(node, ())

    def learn(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """The node has these from now on."""
        self._addresses.pop(node, None)
        self._addresses[node] = addresses
        if len(self._addresses) > MOST_NODES:
            del self._addresses[next(iter(self._addresses))]
