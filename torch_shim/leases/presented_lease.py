"""A request's own lease: presented, given back after its last call, and reacquired if needed."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from torch_shim.errors import RemoteFailure, WireError
from torch_shim.leases import request_context
from torch_shim.leases.habits import Habits
from torch_shim.leases.managers import Nodes
from torch_shim.leases.request_context import RequestLease
from torch_shim.weights.model_weights import ModelImage
from torch_shim.wire.manager_session import LeaseElsewhere, ManagerSession, ModelLease
from torch_shim.wire.protocol import FailureKind

log = logging.getLogger("gpufaas")

# A function has about one lease at a time from each gateway; tokens come from callers.
_MOST_CLAIMS = 64

# Brings a root's weights to a session's node unless the node has them, and returns the model.
Bring = Callable[[ManagerSession], ModelImage]


class SessionLease(NamedTuple):
    """A lease for one call, with its session and model.

    `presented` is set if the lease came with the request.
    """

    session: ManagerSession
    model: ModelImage
    lease: ModelLease
    presented: "PresentedLease | None" = None

    def begin_call(self) -> None:
        """Record that a call under this lease begins."""
        request_context.note_model(self.model.digest)
        if self.presented is not None:
            self.presented.begin_call()

    def end_call(self, *, answered: bool) -> None:
        """Record that the call has ended; this may give the lease back."""
        if answered:
            request_context.note_answer()
        if self.presented is not None:
            self.presented.end_call(answered=answered)


class ClaimedLease:
    """A lease as this process holds it: the session, and the lease of each of its models."""

    __slots__ = ("leases", "session")

    def __init__(self) -> None:
        self.session: ManagerSession | None = None
        self.leases: dict[str, ModelLease] = {}


class StandingClaims:
    """Claimed leases that serve several requests, by the token that all of these bring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: OrderedDict[str, ClaimedLease] = OrderedDict()

    def of(self, token: str) -> ClaimedLease:
        """What this process has claimed by this token: at first, nothing."""
        with self._lock:
            claimed = self._claims.setdefault(token, ClaimedLease())
            self._claims.move_to_end(token)
            if len(self._claims) > _MOST_CLAIMS:
                self._claims.popitem(last=False)
            return claimed


class PresentedLease:
    """The state of one request's lease, which its token names. Thread-safe."""

    def __init__(
        self,
        given: RequestLease,
        nodes: Nodes,
        habits: Habits | None,
        claimed: "ClaimedLease | None" = None,
    ) -> None:
        """Without habits the lease is kept until the request ends, or longer.

        `claimed` is what an earlier request with the same token has claimed.
        """
        # `given` itself is not stored: it is the weak key under which this object is kept.
        self._shown, self._claims = given.token, given.claims
        self._models = given.models  # grows as the request calls more of them
        self._nodes = nodes
        self._habits = habits
        self.asking = threading.Lock()
        self._claimed = ClaimedLease() if claimed is None else claimed
        # Further models' leases are acquired by the token or by a lease number: one of them is set.
        self._token: str | None = given.token
        self._joined: int | None = None
        self._counting = threading.Lock()
        self._calls = 0
        self._running = 0
        self._returned: frozenset[str] | None = None  # the models called before it was given back
        self._returns = habits is not None
        self._unusable = False

    def lease_for(self, batch: int, bring: Bring) -> SessionLease | None:
        """Return the request's lease; None if it has ended, or its node cannot be reached."""
        if self._unusable:
            return None
        try:
            return self._lease_for(batch, bring)
        except RemoteFailure as failure:
            if failure.failure != FailureKind.LEASE:
                raise
            log.info("this request's lease is no longer in force: %s", failure)
        except WireError as error:
            log.warning("this request's lease cannot be used: %s", error)
        self._unusable = True
        return None

    def begin_call(self) -> None:
        """Count a call under this lease as running."""
        with self._counting:
            self._running += 1

    def end_call(self, *, answered: bool) -> None:
        """Count a call as ended; give the lease back if the call is predicted to be the last."""
        with self._counting:
            self._running -= 1
            self._calls += answered
            last = answered and not self._running and self._is_last()
        # A thread that holds the lock needs the lease for a further call.
        if last and self.asking.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                self.asking.release()

    def request_ended(self) -> None:
        """Record the request's number of calls after it has been answered."""
        if self._habits is not None and self._calls and not self._unusable:
            self._habits.finished(self._models, self._calls)
        for lease in list(self._claimed.leases.values()):
            lease.peer.send_dropped()  # no call may follow for long

    # -- inside ------------------------------------------------------------------------------

    def _lease_for(self, batch: int, bring: Bring) -> SessionLease:
        session = self._claimed.session
        if session is None:
            session = self._claimed.session = self._nodes.holder(self._shown, self._claims.node)
        model = bring(session)
        lease = self._claimed.leases.get(model.digest)
        if lease is None:
            lease = self._ahead(session, model.digest)
        if lease is not None and session.holds(lease):
            return SessionLease(session, model, lease, self)
        with self.asking:
            return self._acquire(batch, bring)

    def _ahead(self, session: ManagerSession, digest: str) -> ModelLease | None:
        """The token's lease as it will be found, unless it was given back; None: acquire it."""
        if self._token != self._shown or self._returned is not None or not self._claims.lease:
            return None
        lease = session.lease_ahead(self._claims.lease, self._claims.gpu, digest)
        return None if lease is None else self._claimed.leases.setdefault(digest, lease)

    def _acquire(self, batch: int, bring: Bring) -> SessionLease:
        """Acquire the model's lease, unless another thread has done so since; `asking` is held."""
        if self._returned is not None:
            self._reacquire(self._returned, batch, bring)
        session = self._claimed.session
        assert session is not None, "the session is set before the first lease is acquired"
        model = bring(session)
        lease = self._claimed.leases.get(model.digest)
        if lease is None or not session.holds(lease):
            if lease is not None:
                session.forget_worker(self._claims.gpu, model.digest)
            lease = session.acquire_here(model.digest, batch, self._token, lease=self._joined)
            self._claimed.leases[model.digest] = lease
        return SessionLease(session, model, lease, self)

    def _is_last(self) -> bool:
        habits = self._habits if self._returns and self._claimed.leases else None
        return habits is not None and habits.calls(self._models) == self._calls

    def _give_back(self) -> None:
        session, leases = self._claimed.session, list(self._claimed.leases.values())
        assert session is not None, "a call was answered"
        self._returned, self._returns = frozenset(self._models), False
        try:
            session.give_back(leases, self._claims.request)
        except WireError as error:
            log.info("a lease was not given back, because it has ended: %s", error)

    def _reacquire(self, returned: frozenset[str], batch: int, bring: Bring) -> None:
        """After a wrong prediction, acquire another lease for the same request, on any node."""
        assert self._habits is not None, "without habits no lease is given back"
        self._habits.note_wrong_guess(returned)
        self._returned, self._claimed.leases = None, {}
        session = self._claimed.session
        assert session is not None, "a call was answered"
        digest = bring(session).digest
        found = session.acquire(digest, batch, self._token, again=True)
        if isinstance(found, LeaseElsewhere):
            self._follow(session, found, batch, bring)
        else:
            self._claimed.leases[digest] = found
            self._token, self._joined = None, found.number

    def _follow(
        self, session: ManagerSession, found: LeaseElsewhere, batch: int, bring: Bring
    ) -> None:
        try:
            there = self._nodes.reach(found.addresses, found.node)
            digest = bring(there).digest
            lease = there.acquire_here(digest, batch, found.token)
        except (RemoteFailure, WireError):
            session.release(found.number, self._claims.request)
            raise
        session.report_claimed(found.number, self._claims.request)
        self._claimed.session, self._token = there, found.token
        self._claimed.leases[digest] = lease
