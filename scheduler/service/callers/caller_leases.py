"""Leases that end with their caller: with the connection by which the caller shows its presence."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from scheduler.model.values import LeaseId, RequestId
from scheduler.service.leadership.term import Office

# A caller whose connection broke may connect again within this time.
RETURN_S = 1.0
_SPARE = 1_000
_NO_REQUEST = RequestId("")


class CallerLeases:
    """Who acquired which lease; those of a caller end once the caller was present and is not."""

    def __init__(self) -> None:
        self._present: Counter[str] = Counter()
        self._callers: dict[LeaseId, str] = {}
        # Of leases that several requests have.
        self._parts: dict[LeaseId, dict[RequestId, str]] = {}

    def __len__(self) -> int:
        """The number of leases that would end with their callers."""
        return len(self._callers) + len(self._parts)

    @contextmanager
    def present(self, office: Office, caller: str, leases: Iterable[LeaseId]) -> Iterator[None]:
        """Count a connection of this caller, which holds these leases already.

        When the last one has ended for a moment, its leases are released.
        """
        self._present[caller] += 1
        for lease in leases:
            self.granted(office, caller, lease)
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(RETURN_S, self._left, office, caller)

    def granted(
        self, office: Office, caller: str, lease: LeaseId, request: RequestId | None = None
    ) -> None:
        """Note that this caller has the lease; a caller without a name keeps it without presence.

        Of a lease that several requests have it has only the part of the named one. A caller may
        connect a moment after its first leases.
        """
        in_force = office.core.placer.leases
        found = in_force.get(lease)
        if not caller or found is None:
            pass
        elif not found.is_shared:
            self._callers[lease] = caller
        elif request is not None:
            self._parts.setdefault(lease, {})[request] = caller
        if len(self) > 2 * len(in_force) + _SPARE:
            self._callers = {one: who for one, who in self._callers.items() if one in in_force}
            self._parts = {one: parts for one, parts in self._parts.items() if one in in_force}

    def caller_of(self, lease: LeaseId) -> str | None:
        """Who acquired this lease, if it would end with them; nobody keeps one that is shared."""
        return self._callers.get(lease)

    def released(self, lease: LeaseId, request: RequestId | None = None) -> None:
        """Forget a lease that was released, by one of its requests or as a whole."""
        self._callers.pop(lease, None)
        parts = self._parts.get(lease)
        if parts is None:
            return
        if request is None:
            parts.clear()
        parts.pop(request or _NO_REQUEST, None)
        if not parts:
            del self._parts[lease]

    def _left(self, office: Office, caller: str) -> None:
        self._present[caller] -= 1
        if self._present[caller]:
            return
        del self._present[caller]
        held: list[tuple[LeaseId, RequestId | None]] = [
            (lease, None) for lease, who in self._callers.items() if who == caller
        ]
        for lease, parts in self._parts.items():
            held += [(lease, request) for request, who in parts.items() if who == caller]
        for lease, request in held:
            self.released(lease, request)
            if not office.closed and lease in office.core.placer.leases:
                office.driver.release(lease, request)
