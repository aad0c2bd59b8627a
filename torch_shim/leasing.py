"""Which lease a call runs under: the one that its request was given, else one that we ask for."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch_shim import placement
from torch_shim.client import Elsewhere, Lease, Session
from torch_shim.errors import RemoteFailure, WireError
from torch_shim.nodes import Nodes
from torch_shim.placement import Given
from torch_shim.protocol import Failure
from torch_shim.weights import Model

log = logging.getLogger("gpufaas")

# Leases may end between their grant and their first use; a node's death is soon known.
_ATTEMPTS = 3
_PAUSE_S = 0.25

# Brings a root's weights to a session's node, if they are not there yet.
Bring = Callable[[Session], Model]


class Right(NamedTuple):
    """What a call needs: a lease, and the session and model that it is for."""

    session: Session
    model: Model
    lease: Lease


@dataclass(slots=True, eq=False)
class _Presented:
    """What became of one request's token."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session: Session | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    useless: bool = False


class Leasing:
    """The leases of this process. Thread-safe."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[Session, Lease]] = {}
        self._asking: dict[str, threading.Lock] = {}
        self._presented: WeakKeyDictionary[Given, _Presented] = WeakKeyDictionary()

    def right(self, batch: int, bring: Bring) -> Right:
        """A lease in force as far as we know, waiting for one if need be.

        Raises RemoteFailure where it is refused, WireError where our own GPU manager is gone.
        """
        given = placement.current()
        if given is not None:
            found = self._given(given, batch, bring)
            if found is not None:
                return found
        return self._own(batch, bring)

    # -- a lease that the request was given -------------------------------------------------------

    def _given(self, given: Given, batch: int, bring: Bring) -> Right | None:
        """That lease; None where it has ended, or its node cannot be reached."""
        with self._lock:
            known = self._presented.setdefault(given, _Presented())
        if known.useless:
            return None
        try:
            return self._present(known, given, batch, bring)
        except RemoteFailure as failure:
            if failure.failure != Failure.LEASE:
                raise
            log.info("the lease that this request was given is of no use any more: %s", failure)
        except WireError as error:
            log.warning("the lease that this request was given cannot be used: %s", error)
        known.useless = True
        return None

    def _present(self, known: _Presented, given: Given, batch: int, bring: Bring) -> Right:
        session = known.session
        if session is None:
            session = known.session = self._nodes.reach(given.addresses, given.node)
        model = bring(session)
        lease = known.leases.get(model.digest)
        if lease is None or not session.holds(lease):
            with known.lock:
                lease = known.leases.get(model.digest)
                if lease is None or not session.holds(lease):
                    found = session.acquire(model.digest, batch, given.token)
                    assert isinstance(found, Lease), "a token is for one node"
                    lease = known.leases[model.digest] = found
        return Right(session, model, lease)

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

    def _ask(self, model: Model, batch: int, bring: Bring) -> Right:
        """A lease on our own node or, if the scheduler says so, elsewhere."""
        own = self._nodes.own
        for attempt in range(1, _ATTEMPTS + 1):
            found = own.acquire(model.digest, batch)
            if isinstance(found, Lease):
                return Right(own, model, found)
            try:
                return self._follow(found, batch, bring)
            except (RemoteFailure, WireError) as error:
                own.release(found.number)
                if isinstance(error, RemoteFailure) and error.failure != Failure.LEASE:
                    raise
                log.warning("the lease %d on node %s: %s", found.number, found.node, error)
                if attempt == _ATTEMPTS:
                    raise _out_of_reach(found, error) from error
            time.sleep(_PAUSE_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _follow(self, found: Elsewhere, batch: int, bring: Bring) -> Right:
        session = self._nodes.reach(found.addresses, found.node)
        model = bring(session)
        lease = session.acquire(model.digest, batch, found.token)
        assert isinstance(lease, Lease), "a token is for one node"
        return Right(session, model, lease)


def _out_of_reach(found: Elsewhere, error: Exception) -> RemoteFailure:
    message = f"node {found.node}, where the scheduler gave a lease, is of no use: {error}"
    return RemoteFailure(Failure.LOST, message, {"node": found.node})
