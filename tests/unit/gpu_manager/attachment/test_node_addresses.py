"""What a manager remembers of other nodes' addresses."""

from cache_manager.model.ids import NodeId
from gpu_manager.attachment.attachment import MOST_NODES, NodeAddresses


def test_nodes_that_were_named_last_are_known_however_many_have_come_and_gone() -> None:
    known = NodeAddresses()
    for number in range(2 * MOST_NODES):
        known.learn(NodeId(f"n{number}"), (f"tcp:10.0.0.1:{number}",))
        known.learn(NodeId("busy"), ("tcp:10.0.0.2:1",))

    assert known.of(NodeId("n0")) == ()
    assert known.of(NodeId("busy")) == ("tcp:10.0.0.2:1",)
    last = 2 * MOST_NODES - 1
    assert known.of(NodeId(f"n{last}")) == (f"tcp:10.0.0.1:{last}",)
