"""The users that workers of tenants run as: one for each tenant that has workers; pure."""

from collections import Counter, deque


class WorkerUsers:
    """Gives each tenant a user of its own for as long as it has a worker, or is about to.

    A user that no tenant has any more becomes another's: the one that has been free for longest.
    """

    def __init__(self, first_uid: int, count: int) -> None:
        self._fresh_uid = first_uid
        self._end_uid = first_uid + count
        self._free: deque[int] = deque()
        self._uids: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def take(self, tenant: str) -> int | None:
        """The tenant's user, until one more `give_back`; None if others have all that there are."""
        uid = self._uids.get(tenant)
        if uid is None:
            uid = self._unused()
            if uid is None:
                return None
            self._uids[tenant] = uid
        self._counts[tenant] += 1
        return uid

    def give_back(self, tenant: str) -> None:
        """One worker of the tenant has ended, or will not come."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
            self._free.append(self._uids.pop(tenant))

    def _unused(self) -> int | None:
        if self._fresh_uid < self._end_uid:
            self._fresh_uid += 1
            return self._fresh_uid - 1
        return self._free.popleft() if self._free else None
