"""The lease that one request was given: presented, given back after its last call, wanted again."""

import logging
import threading
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

# Brings a root's weights to a session's node, if they are not there yet.
Bring = Callable[[ManagerSession], ModelImage]


class Right(NamedTuple):
    """What a call needs: a lease, and the session and model that it is for.

    `presented` is set where the lease is one that the request was given.
    """

    session: ManagerSession
    model: ModelImage
    lease: ModelLease
    presented: "Presented | None" = None

    def begins(self) -> None:
        """A call is made by this right."""
        request_context.note(self.model.digest)
        if self.presented is not None:
            self.presented.call_begins()

    def ends(self, *, answered: bool) -> None:
        """The call is over; the lease may go back now."""
        if self.presented is not None:
            self.presented.call_ends(answered=answered)


class Presented:
    """What became of one request's token. Thread-safe."""

    def __init__(self, given: RequestLease, nodes: Nodes, habits: Habits | None) -> None:
        """Without habits the lease is kept to the request's end."""
        # Not what was given itself: this is kept for as long as that is there.
        self._shown, self._node = given.token, given.node
        self._models = given.models  # grows as the request calls more of them
        self._nodes = nodes
        self._habits = habits
        self.asking = threading.Lock()
        self._session: ManagerSession | None = None
        # By what further leases of the session are asked for: one of these is set.
        self._token: str | None = given.token
        self._joined: int | None = None
        self._leases: dict[str, ModelLease] = {}
        self._counting = threading.Lock()
        self._calls = 0
        self._running = 0
        self._returned: frozenset[str] | None = None  # given back, after calls of these models
        self._returns = habits is not None
        self._useless = False

    def right(self, batch: int, bring: Bring) -> Right | None:
        """The request's lease; None where it has ended, or its node cannot be reached."""
        if self._useless:
            return None
        try:
            return self._right(batch, bring)
        except RemoteFailure as failure:
            if failure.failure != FailureKind.LEASE:
                raise
            log.info("the lease that this request was given is of no use any more: %s", failure)
        except WireError as error:
            log.warning("the lease that this request was given cannot be used: %s", error)
        self._useless = True
        return None

    def call_begins(self) -> None:
        """A call under this lease is on its way."""
        with self._counting:
            self._running += 1

    def call_ends(self, *, answered: bool) -> None:
        """The call is over; if it is the last one by all that is known, the lease goes back."""
        with self._counting:
            self._running -= 1
            self._calls += answered
            last = answered and not self._running and self._is_last()
        # Whoever is asking at the moment wants it for a further call.
        if last and self.asking.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                self.asking.release()

    def request_ended(self) -> None:
        """The request has been answered: its calls are all there were."""
        if self._habits is not None and self._calls and not self._useless:
            self._habits.finished(self._models, self._calls)

    # -- inside ------------------------------------------------------------------------------

    def _right(self, batch: int, bring: Bring) -> Right:
        session = self._session
        if session is None:
            session = self._session = self._nodes.holder(self._shown, self._node)
        model = bring(session)
        lease = self._leases.get(model.digest)
        if lease is not None and session.holds(lease):
            return Right(session, model, lease, self)
        with self.asking:
            return self._asked(batch, bring)

    def _asked(self, batch: int, bring: Bring) -> Right:
        """As another thread may have left it meanwhile, or else by asking."""
        if self._returned is not None:
            self._want_again(self._returned, batch, bring)
        session = self._session
        assert session is not None, "it is reached before anything is asked"
        model = bring(session)
        lease = self._leases.get(model.digest)
        if lease is None or not session.holds(lease):
            found = session.acquire(model.digest, batch, self._token, lease=self._joined)
            assert isinstance(found, ModelLease), "what is named is on the session's node"
            lease = self._leases[model.digest] = found
        return Right(session, model, lease, self)

    def _is_last(self) -> bool:
        habits = self._habits if self._returns and self._leases else None
        return habits is not None and habits.calls(self._models) == self._calls

    def _give_back(self) -> None:
        session, leases = self._session, list(self._leases.values())
        assert session is not None, "a call was answered"
        self._returned, self._returns = frozenset(self._models), False
        try:
            session.give_back(leases)
        except WireError as error:
            log.info("a lease was not given back, for it ended: %s", error)

    def _want_again(self, returned: frozenset[str], batch: int, bring: Bring) -> None:
        """The guess was wrong: another lease for the same request, wherever that is."""
        assert self._habits is not None, "without habits no lease is given back"
        self._habits.mistaken(returned)
        self._returned, self._leases = None, {}
        session = self._session
        assert session is not None, "a call was answered"
        digest = bring(session).digest
        found = session.acquire(digest, batch, self._token, again=True)
        if isinstance(found, LeaseElsewhere):
            self._follow(session, found, batch, bring)
        else:
            self._leases[digest] = found
            self._token, self._joined = None, found.number

    def _follow(
        self, session: ManagerSession, found: LeaseElsewhere, batch: int, bring: Bring
    ) -> None:
        try:
            there = self._nodes.reach(found.addresses, found.node)
            digest = bring(there).digest
            lease = there.acquire(digest, batch, found.token)
        except (RemoteFailure, WireError):
            session.release(found.number)
            raise
        assert isinstance(lease, ModelLease), "a token is for one node"
        session.claimed(found.number)
        self._session, self._token = there, found.token
        self._leases[digest] = lease
