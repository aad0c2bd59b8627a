"""Finds the lease for a call: its request's lease, else one that this process acquires."""

import logging
import threading
import time
from weakref import WeakKeyDictionary

from torch_shim import call_deadline
from torch_shim.errors import RemoteFailure, WireError
from torch_shim.leases import request_context
from torch_shim.leases.habits import Habits
from torch_shim.leases.managers import Nodes
from torch_shim.leases.presented_lease import (
    Bring,
    PresentedLease,
    SessionLease,
    StandingClaims,
)
from torch_shim.leases.request_context import RequestLease
from torch_shim.weights.model_weights import ModelImage
from torch_shim.wire.manager_session import LeaseElsewhere, ManagerSession, ModelLease
from torch_shim.wire.protocol import FailureKind

log = logging.getLogger("gpufaas")

# A lease may end between its grant and its first use, for example when its node fails.
_ATTEMPTS = 3
_PAUSE_S = 0.25


class ProcessLeases:
    """The leases of this process. Thread-safe."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._habits = Habits()
        self._lock = threading.Lock()
        self._acquired: dict[str, tuple[ManagerSession, ModelLease]] = {}
        self._acquiring: dict[str, threading.Lock] = {}
        self._standing = StandingClaims()
        self._presented: WeakKeyDictionary[RequestLease, PresentedLease] = WeakKeyDictionary()

    def lease_for(self, batch: int, bring: Bring) -> SessionLease:
        """Return a lease that this process believes to be in force; wait for one if necessary.

        Raise RemoteFailure if it is refused, WireError if this node's GPU manager is unreachable.
        """
        given = request_context.current()
        presented = None if given is None else self.presented_by(given).lease_for(batch, bring)
        found = presented or self._acquired_lease(batch, bring)
        if found.lease.peer.has_unused:
            self._nodes.sweep_later()
        return found

    @property
    def requests(self) -> int:
        """The number of requests in progress that came with a lease."""
        return len(self._presented)

    def presented_by(self, given: RequestLease) -> PresentedLease:
        """Return the presented lease of a request; created at the first call."""
        with self._lock:
            known = self._presented.get(given)
            if known is None:
                standing = given.claims.stands
                claimed = self._standing.of(given.token) if standing else None
                habits = None if standing else self._habits
                known = PresentedLease(given, self._nodes, habits, claimed)
                self._presented[given] = known
                given.at_end(known.request_ended)
            return known

    # -- a lease that this process acquires -------------------------------------------------------

    def _acquired_lease(self, batch: int, bring: Bring) -> SessionLease:
        model = bring(self._nodes.own)
        found = self._in_force(model.digest, bring)
        if found is not None:
            return found
        with self._lock:
            acquiring = self._acquiring.setdefault(model.digest, threading.Lock())
        # The thread that asks does so for all; when its call's time is up, another one asks on.
        left_s = call_deadline.seconds_left()
        if not acquiring.acquire(timeout=-1 if left_s is None else left_s):
            raise RemoteFailure(FailureKind.EXPIRED, "the call's time is up")
        try:
            found = self._in_force(model.digest, bring)
            if found is None:
                found = self._acquire(model, batch, bring)
                self._acquired[model.digest] = found.session, found.lease
            return found
        finally:
            acquiring.release()

    def _in_force(self, digest: str, bring: Bring) -> SessionLease | None:
        session, lease = self._acquired.get(digest, (None, None))
        if session is None or lease is None or not session.holds(lease):
            return None
        model = bring(session)
        return SessionLease(session, model, lease) if model.digest == digest else None

    def _acquire(self, model: ModelImage, batch: int, bring: Bring) -> SessionLease:
        """Acquire a lease on this node or, if the scheduler places the request there, another."""
        own = self._nodes.own
        for attempt in range(1, _ATTEMPTS + 1):
            # Work of before would be lost if the request were refused for now.
            found = own.acquire(model.digest, batch, goes_on=request_context.goes_on())
            if isinstance(found, ModelLease):
                return SessionLease(own, model, found)
            try:
                return self._follow(found, batch, bring)
            except (RemoteFailure, WireError) as error:
                own.release(found.number, request_context.claims_of(found.token).request)
                if isinstance(error, RemoteFailure) and error.failure != FailureKind.LEASE:
                    raise
                log.warning("lease %d on node %s is unusable: %s", found.number, found.node, error)
                if attempt == _ATTEMPTS:
                    raise _unusable(found, error) from error
            time.sleep(_PAUSE_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _follow(self, found: LeaseElsewhere, batch: int, bring: Bring) -> SessionLease:
        """Claim a lease on another node."""
        session = self._nodes.reach(found.addresses, found.node)
        model = bring(session)
        lease = session.acquire_here(model.digest, batch, found.token)
        request = request_context.claims_of(found.token).request
        self._nodes.own.report_claimed(found.number, request)
        return SessionLease(session, model, lease)


def _unusable(found: LeaseElsewhere, error: Exception) -> RemoteFailure:
    message = f"the lease that the scheduler granted on node {found.node} is unusable: {error}"
    return RemoteFailure(FailureKind.LOST, message, {"node": found.node})
