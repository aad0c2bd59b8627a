"""Bounds the connections of clients that have not sent HELLO, and those of each tenant."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.telemetry.stranger_log import StrangerLog
from gpu_manager.errors import ClientNotAllowed

log = logging.getLogger(__name__)

# The shares (1/N) of this process's descriptors, and the least numbers. A connection with uploads
# under way holds up to seven descriptors, so one tenant holds less than half of all.
_STRANGERS_SHARE, _LEAST_STRANGERS = 16, 32
_TENANT_SHARE, _LEAST_OF_A_TENANT = 16, 64


@dataclass(slots=True, eq=False)
class ConnectionPlace:
    """The place of one connection among those of strangers, later among its tenant's."""

    hang_up: Callable[[], object]
    tenant: str | None = None


class ConnectionLimits:
    """Counts the open connections.

    Beyond the most strangers the one that has waited the longest is hung up on, so that a client
    that sends HELLO at once is admitted however many others are silent.
    """

    def __init__(self, descriptors: int) -> None:
        """`descriptors` is the number that this process may have open."""
        self.most_strangers = max(_LEAST_STRANGERS, descriptors // _STRANGERS_SHARE)
        self.most_of_a_tenant = max(_LEAST_OF_A_TENANT, descriptors // _TENANT_SHARE)
        self.strangers = StrangerLog(log)
        self.unidentified: dict[ConnectionPlace, None] = {}  # the oldest first
        self.clients: Counter[str] = Counter()

    def identified(self, place: ConnectionPlace, tenant: str) -> None:
        """Record a client's tenant; raise ClientNotAllowed if it has too many connections."""
        if self.clients[tenant] >= self.most_of_a_tenant:
            raise ClientNotAllowed(f"{tenant} has {self.clients[tenant]} connections already")
        self.unidentified.pop(place, None)
        place.tenant = tenant
        self.clients[tenant] += 1

    @contextmanager
    def stranger(self, hang_up: Callable[[], object]) -> Iterator[ConnectionPlace]:
        """Count a new connection until the end of the block; `hang_up` ends the connection."""
        place = ConnectionPlace(hang_up)
        self.unidentified[place] = None
        if len(self.unidentified) > self.most_strangers:
            oldest = next(iter(self.unidentified))
            del self.unidentified[oldest]
            text = "closed the oldest of %d connections without HELLO"
            self.strangers.warn(text, self.most_strangers)
            oldest.hang_up()
        try:
            yield place
        finally:
            self.unidentified.pop(place, None)
            if place.tenant is not None:
                self.clients[place.tenant] -= 1
                if not self.clients[place.tenant]:
                    del self.clients[place.tenant]
