"""Where a configuration runs."""

from research.esg.node_choice import NodeChoice, NodeRoom, dispatch
from scheduler.cluster.view import home
from scheduler.model.values import Configuration

LARGE, SMALL = Configuration(4, 4, 4), Configuration(1, 1, 1)
WARM, COLD, FULL = NodeRoom(8, 7, True), NodeRoom(8, 7, False), NodeRoom(0, 7, True)


def test_dispatch_takes_the_preferred_node_when_it_has_room_and_an_instance() -> None:
    assert dispatch([LARGE], [WARM, WARM, WARM], 1) == NodeChoice(LARGE, 1)


def test_dispatch_takes_the_next_warm_node_when_the_preferred_one_is_full_or_cold() -> None:
    assert dispatch([LARGE], [WARM, FULL, WARM], 1) == NodeChoice(LARGE, 2)
    assert dispatch([LARGE], [WARM, COLD, FULL], 1) == NodeChoice(LARGE, 0)


def test_dispatch_takes_the_cold_node_with_most_room_when_none_is_warm() -> None:
    rooms = [NodeRoom(8, 4, False), NodeRoom(8, 6, False), NodeRoom(16, 4, False)]

    assert dispatch([LARGE], rooms, 0) == NodeChoice(LARGE, 1)


def test_dispatch_tries_configurations_in_their_order() -> None:
    small = NodeRoom(1, 1, True)

    assert dispatch([LARGE, SMALL], [small], 0) == NodeChoice(SMALL, 0)
    assert dispatch([LARGE], [small], 0) is None


def test_home_is_always_the_same_and_one_of_the_nodes() -> None:
    homes = {home(f"application {number}", "stage", 16) for number in range(100)}

    assert home("a", "b", 16) == home("a", "b", 16)
    assert homes <= set(range(16))
    assert len(homes) > 8
