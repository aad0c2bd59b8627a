"""What is known of leases that nodes may report later: an earlier leader's, and those cut off."""

from collections import OrderedDict
from collections.abc import Iterable

from scheduler.model.events import LiveLease
from scheduler.model.values import LeaseId, RequestId

# So many leases at most are remembered as cut off or released, in case a node reports them later;
# and so many requests of each, which has no more in practice.
_MOST_REMEMBERED = 4096
_MOST_NAMED = 256


class Handover:
    """Requests that have a lease by an earlier leader's word, and releases of unknown leases.

    A caller that got its lease need not ask for it again, so the request may stay unknown.
    """

    def __init__(self, first_lease: int) -> None:
        """Earlier leaders' leases are all below this one."""
        self._first_lease = first_lease
        self.promised: dict[RequestId, LeaseId] = {}  # the leases of requests that are unknown
        self._awaited: dict[LeaseId, dict[RequestId, None]] = {}  # the same, by lease
        # The oldest one leaves at every release: a plain dict would look through what was deleted.
        self._released: OrderedDict[LeaseId, tuple[RequestId | None, ...]] = OrderedDict()

    def ids_raised(self, first_lease: int) -> None:
        """Other leaders gave leases with numbers up to this one."""
        self._first_lease = max(self._first_lease, first_lease)

    # -- leases of unknown requests ---------------------------------------------------------------

    def promise(self, requests: Iterable[RequestId], lease: LeaseId) -> None:
        for request in requests:
            self.take(request)
            self.promised[request] = lease
            self._awaited.setdefault(lease, {})[request] = None

    def take(self, request: RequestId) -> None:
        """This request is known from now on, or needs no lease any longer."""
        lease = self.promised.pop(request, None)
        if lease is not None:
            others = self._awaited[lease]
            del others[request]
            if not others:
                del self._awaited[lease]

    def is_awaited(self, lease: LeaseId) -> bool:
        """Whether some unknown request has this lease."""
        return lease in self._awaited

    def ended(self, lease: LeaseId) -> None:
        if self._awaited:
            for request in self._awaited.pop(lease, ()):
                del self.promised[request]

    # -- releases of unknown leases ---------------------------------------------------------------

    def cut_off(self, lease: LeaseId, *, released: bool) -> None:
        """The lease's node may still have it, and report it: who releases it until then counts."""
        names = self._released.get(lease, ())
        self._remember(lease, (None,) if released else names)

    def release(self, lease: LeaseId, request: RequestId | None = None) -> None:
        """An unknown lease was released, by this request or (without one) by all of its requests.

        A lease of this leader that was not cut off is over by its node's word. Most releases are
        of such: a caller keeps its lease until its node has ended it.
        """
        names = self._released.get(lease)
        if names is None and lease >= self._first_lease:
            return
        names = names or ()
        if request not in names and len(names) < _MOST_NAMED:
            self._remember(lease, (*names, request))

    def _remember(self, lease: LeaseId, names: tuple[RequestId | None, ...]) -> None:
        self._released[lease] = names
        if len(self._released) > _MOST_REMEMBERED:
            self._released.popitem(last=False)

    def left(self, found: LiveLease) -> tuple[RequestId, ...] | None:
        """Its requests that have not released it; None if it was released for good."""
        names = self._released.get(found.lease)
        if not names:
            return found.requests
        left = tuple([request for request in found.requests if request not in names])
        return None if None in names or not left else left
