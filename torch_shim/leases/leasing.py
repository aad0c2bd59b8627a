"""Which lease a call runs under: the one that its request was given, else one that we ask for."""

import logging
import threading
import time
from weakref import WeakKeyDictionary

from torch_shim.errors import RemoteFailure, WireError
from torch_shim.leases import request_context
from torch_shim.leases.habits import Habits
from torch_shim.leases.managers import Nodes
from torch_shim.leases.presented_lease import Bring, Presented, Right
from torch_shim.leases.request_context import RequestLease
from torch_shim.weights.model_weights import ModelImage
from torch_shim.wire.manager_session import LeaseElsewhere, ManagerSession, ModelLease
from torch_shim.wire.protocol import FailureKind

log = logging.getLogger("gpufaas")

# Leases may end between their grant and their first use; a node's death is soon known.
_ATTEMPTS = 3
_PAUSE_S = 0.25


class ProcessLeases:
    """The leases of this process. Thread-safe."""

    def __init__(self, nodes: Nodes, *, early_return: bool = True) -> None:
        """With `early_return`, a request's lease goes back after what seems to be its last call."""
        self._nodes = nodes
        self._habits = Habits() if early_return else None
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[ManagerSession, ModelLease]] = {}
        self._asking: dict[str, threading.Lock] = {}
        self._presented: WeakKeyDictionary[RequestLease, Presented] = WeakKeyDictionary()

    def right(self, batch: int, bring: Bring) -> Right:
        """A lease in force as far as we know, waiting for one if need be.

        Raises RemoteFailure where it is refused, WireError where our own GPU manager is gone.
        """
        given = request_context.current()
        if given is not None:
            found = self.presented_by(given).right(batch, bring)
            if found is not None:
                return found
        return self._own(batch, bring)

    @property
    def requests(self) -> int:
        """How many requests that brought a lease are known."""
        return len(self._presented)

    def presented_by(self, given: RequestLease) -> Presented:
        with self._lock:
            known = self._presented.get(given)
            if known is None:
                known = self._presented[given] = Presented(given, self._nodes, self._habits)
                given.at_end(known.request_ended)
            return known

    # -- a lease that we ask for ------------------------------------------------------------------

    def _own(self, batch: int, bring: Bring) -> Right:
        model = bring(self._nodes.own)
        found = self._in_force(model.digest, bring)
        if found is not None:
            return found
        with self._lock:
            asking = self._asking.setdefault(model.digest, threading.Lock())
        with asking:
            found = self._in_force(model.digest, bring)
            if found is None:
                found = self._ask(model, batch, bring)
                self._asked[model.digest] = found.session, found.lease
            return found

    def _in_force(self, digest: str, bring: Bring) -> Right | None:
        session, lease = self._asked.get(digest, (None, None))
        if session is None or lease is None or not session.holds(lease):
            return None
        model = bring(session)
        return Right(session, model, lease) if model.digest == digest else None

    def _ask(self, model: ModelImage, batch: int, bring: Bring) -> Right:
        """A lease on our own node or, if the scheduler says so, elsewhere."""
        own = self._nodes.own
        for attempt in range(1, _ATTEMPTS + 1):
            found = own.acquire(model.digest, batch)
            if isinstance(found, ModelLease):
                return Right(own, model, found)
            try:
                return self._follow(found, batch, bring)
            except (RemoteFailure, WireError) as error:
                own.release(found.number)
                if isinstance(error, RemoteFailure) and error.failure != FailureKind.LEASE:
                    raise
                log.warning("the lease %d on node %s: %s", found.number, found.node, error)
                if attempt == _ATTEMPTS:
                    raise _out_of_reach(found, error) from error
            time.sleep(_PAUSE_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _follow(self, found: LeaseElsewhere, batch: int, bring: Bring) -> Right:
        session = self._nodes.reach(found.addresses, found.node)
        model = bring(session)
        lease = session.acquire(model.digest, batch, found.token)
        assert isinstance(lease, ModelLease), "a token is for one node"
        self._nodes.own.claimed(found.number)
        return Right(session, model, lease)


def _out_of_reach(found: LeaseElsewhere, error: Exception) -> RemoteFailure:
    message = f"node {found.node}, where the scheduler gave a lease, is of no use: {error}"
    return RemoteFailure(FailureKind.LOST, message, {"node": found.node})
