"""How many connections a server has open, and which of them makes room for a new one. Pure."""

from typing import Protocol


class CountedConnection(Protocol):
    """One open connection; `host` is the address of its peer."""

    host: str

    def drop(self) -> None:
        """Close at once: a new connection takes the place of this one."""


class ConnectionTable:
    """Counts connections up to a bound, and knows which of them wait for a request.

    At the bound a new connection takes the place of the one that has waited the longest, of the
    host with the most waiting connections: who opens many cannot keep out who opens one. Where
    every connection has a request in progress, the new one is not admitted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[CountedConnection] = set()
        # By host, the longest waiting first.
        self._waiting: dict[str, dict[CountedConnection, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: CountedConnection) -> bool:
        """Count a new connection, which waits for a request; False if there is no room."""
        if len(self._open) >= self._most:
            if not self._waiting:
                return False
            crowd = max(self._waiting, key=lambda host: len(self._waiting[host]))
            oldest = next(iter(self._waiting[crowd]))
            self.remove(oldest)
            oldest.drop()
        self._open.add(connection)
        self.waits(connection)
        return True

    def remove(self, connection: CountedConnection) -> None:
        """Count a connection no more; harmless for one that is not counted."""
        self._open.discard(connection)
        self.works(connection)

    def waits(self, connection: CountedConnection) -> None:
        """The connection waits for a request: from now on it may have to make room."""
        if connection in self._open:
            self._waiting.setdefault(connection.host, {})[connection] = None

    def works(self, connection: CountedConnection) -> None:
        same_host = self._waiting.get(connection.host)
        if same_host is not None and connection in same_host:
            del same_host[connection]
            if not same_host:
                del self._waiting[connection.host]
