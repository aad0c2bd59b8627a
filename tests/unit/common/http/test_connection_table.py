"""Which connection makes room for a new one."""

from common.http.server_protocol import ConnectionTable


class Connection:
    """Notes whether it was dropped."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_longest_waiting_of_the_host_with_the_most_makes_room() -> None:
    table = ConnectionTable(4)
    manager, *crowd = (Connection(host) for host in ("m", "s", "s", "s"))
    assert all(table.admit(each) for each in (manager, *crowd))
    assert table.admit(Connection("s"))
    assert [each.dropped for each in (manager, *crowd)] == [False, True, False, False]
    assert len(table) == 4


def test_connection_with_a_request_does_not_make_room() -> None:
    table = ConnectionTable(2)
    busy, waiting = Connection("a"), Connection("a")
    table.admit(busy)
    table.admit(waiting)
    table.works(busy)
    assert table.admit(Connection("b"))
    assert (busy.dropped, waiting.dropped) == (False, True)


def test_nobody_is_admitted_while_every_connection_has_a_request() -> None:
    table = ConnectionTable(1)
    busy, late = Connection("a"), Connection("b")
    table.admit(busy)
    table.works(busy)
    assert not table.admit(late)
    table.waits(late)  # a connection that was not admitted never counts
    table.remove(late)
    table.waits(busy)
    assert table.admit(late)
    assert busy.dropped


def test_connection_that_is_removed_leaves_room_and_nothing_behind() -> None:
    table = ConnectionTable(1)
    for _ in range(3):
        connection = Connection("a")
        assert table.admit(connection)
        table.remove(connection)
        table.remove(connection)
        assert not connection.dropped
    assert len(table) == 0
