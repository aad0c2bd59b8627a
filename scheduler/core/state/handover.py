"""What a new leader learns of leases that an earlier one gave, by and by, and in any order."""

from collections import OrderedDict
from collections.abc import Iterable

from scheduler.model.events import LiveLease
from scheduler.model.values import LeaseId, RequestId

# How many leases that this core does not know, or no longer knows, are remembered as released, in
# case a node reports them later; and so many requests of each, which has no more in practice.
_MOST_RELEASED = 4096
_MOST_NAMED = 256


class Handover:
    """Requests that have a lease by an earlier leader's word, and releases of unknown leases.

    A caller that got its lease need not ask for it again, so the request may stay unknown.
    """

    __slots__ = ("_awaited", "_promised", "_released")

    def __init__(self) -> None:
        self._promised: dict[RequestId, LeaseId] = {}
        self._awaited: dict[LeaseId, dict[RequestId, None]] = {}  # the same, by lease
        # The oldest one leaves at every release: a plain dict would look through what was deleted.
        self._released: OrderedDict[LeaseId, tuple[RequestId | None, ...]] = OrderedDict()

    # -- leases of unknown requests ---------------------------------------------------------------

    def promise(self, requests: Iterable[RequestId], lease: LeaseId) -> None:
        """These requests have this lease."""
        for request in requests:
            self.take(request)
            self._promised[request] = lease
            self._awaited.setdefault(lease, {})[request] = None

    def promised(self, request: RequestId) -> LeaseId | None:
        """The lease of this request."""
        return self._promised.get(request)

    def take(self, request: RequestId) -> LeaseId | None:
        """The lease of this request, which is known from now on, or needs it no longer."""
        lease = self._promised.pop(request, None)
        if lease is not None:
            others = self._awaited[lease]
            del others[request]
            if not others:
                del self._awaited[lease]
        return lease

    def is_awaited(self, lease: LeaseId) -> bool:
        """Whether some unknown request has this lease."""
        return lease in self._awaited

    def ended(self, lease: LeaseId) -> None:
        """The lease is over."""
        if self._awaited:
            for request in self._awaited.pop(lease, ()):
                del self._promised[request]

    # -- releases of unknown leases ---------------------------------------------------------------

    def release(self, lease: LeaseId, request: RequestId | None = None) -> None:
        """The lease was released, by this request or (without one) by all of its requests."""
        names = self._released.get(lease, ())
        if request not in names and len(names) < _MOST_NAMED:
            self._released[lease] = (*names, request)
            if len(self._released) > _MOST_RELEASED:
                self._released.popitem(last=False)

    def left(self, found: LiveLease) -> tuple[RequestId, ...] | None:
        """Its requests that have not released it; None if it was released for good."""
        names = self._released.get(found.lease)
        if names is None:
            return found.requests
        left = tuple([request for request in found.requests if request not in names])
        return None if None in names or not left else left
