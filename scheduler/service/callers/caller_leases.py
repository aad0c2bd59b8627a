"""Leases that end with their caller: with the connection by which the caller shows its presence."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from scheduler.model.values import LeaseId
from scheduler.service.leadership.term import Office

# A caller whose connection broke may connect again within this time.
RETURN_S = 1.0
_SPARE = 1_000


class CallerLeases:
    """Who acquired which lease; those of a caller end once the caller was present and is not."""

    def __init__(self) -> None:
        self._present: Counter[str] = Counter()
        self._callers: dict[LeaseId, str] = {}

    def __len__(self) -> int:
        """The number of leases that would end with their callers."""
        return len(self._callers)

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

    def granted(self, office: Office, caller: str, lease: LeaseId) -> None:
        """Note that this caller has the lease; a caller without a name keeps it without presence.

        A caller may connect a moment after its first leases.
        """
        in_force = office.core.placer.leases
        if caller and lease in in_force:
            self._callers[lease] = caller
        if len(self._callers) > 2 * len(in_force) + _SPARE:
            self._callers = {one: who for one, who in self._callers.items() if one in in_force}

    def caller_of(self, lease: LeaseId) -> str | None:
        """Who acquired this lease, if it would end with them."""
        return self._callers.get(lease)

    def released(self, lease: LeaseId) -> None:
        """Forget a lease that was released."""
        self._callers.pop(lease, None)

    def _left(self, office: Office, caller: str) -> None:
        self._present[caller] -= 1
        if self._present[caller]:
            return
        del self._present[caller]
        for lease in [lease for lease, who in self._callers.items() if who == caller]:
            del self._callers[lease]
            if not office.closed and lease in office.core.placer.leases:
                office.driver.release(lease)
