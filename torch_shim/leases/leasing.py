"""Finds the lease for a call: its request's own, else one that this process acquires.

A request presents its token, and a call uses what the token names. One rule holds where the worker
or the manager says that this lease is not in force: the call asks by what the request has, and if
that is refused as well, this process acquires a lease without the request's.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from torch_shim.errors import RemoteFailure, WireError
from torch_shim.leases import request_context
from torch_shim.leases.managers import Nodes
from torch_shim.leases.request_context import RequestLease
from torch_shim.weights import ModelImage, process_weights
from torch_shim.wire import current_call
from torch_shim.wire.manager_session import LeaseElsewhere, ManagerSession, ModelLease
from torch_shim.wire.protocol import FailureKind

log = logging.getLogger("gpufaas")

# A lease may end between its grant and its first use, for example when its node fails.
_ATTEMPTS = 3
_PAUSE_S = 0.25
# A function has about one lease at a time from each gateway; tokens come from callers.
_MOST_CLAIMS = 64

# Brings a root's weights to a session's node unless the node has them, and returns the model.
Bring = Callable[[ManagerSession], ModelImage]


class SessionLease(NamedTuple):
    """A lease for one call, with its model; `presented` is set if it came with the request."""

    model: ModelImage
    lease: ModelLease
    presented: "PresentedLease | None" = None

    def begin_call(self) -> None:
        request_context.note_model(self.model.digest)
        if self.presented is not None:
            self.presented.begin_call()

    def end_call(self, *, answered: bool) -> None:
        """This may give the lease back."""
        if answered:
            request_context.note_answer()
        if self.presented is not None:
            self.presented.end_call(answered=answered)


@dataclass(slots=True)
class ClaimedLease:
    """A lease as this process holds it: the session, and the lease of each of its models."""

    session: ManagerSession | None = None
    leases: dict[str, ModelLease] = field(default_factory=dict)


# After this many consecutive requests with the same number of calls, that number is predicted.
ENOUGH = 5
# A wrong prediction doubles the number of requests needed, up to this limit.
_MOST_ENOUGH = 80
# The number of model sets with a history; the least recently used one is dropped.
_MOST_KNOWN = 256


@dataclass(slots=True)
class _Habit:
    """The latest requests that used the same models, and how many calls each of them made."""

    calls: int = 0
    in_a_row: int = 0
    enough: int = ENOUGH


class Habits:
    """The numbers of calls of this process's finished requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._habit = functools.lru_cache(_MOST_KNOWN)(lambda _models: _Habit())

    def calls(self, models: Iterable[str]) -> int | None:
        """Return after how many calls requests for these models end; None while unpredictable."""
        with self._lock:
            habit = self._habit(frozenset(models))
            return habit.calls if habit.in_a_row >= habit.enough else None

    def finished(self, models: Iterable[str], calls: int) -> None:
        """`calls` is at least one."""
        with self._lock:
            habit = self._habit(frozenset(models))
            habit.in_a_row = habit.in_a_row + 1 if habit.calls == calls else 1
            habit.calls = calls

    def note_wrong_guess(self, models: Iterable[str]) -> None:
        """Discard a wrong prediction, and require more requests before the next one."""
        with self._lock:
            habit = self._habit(frozenset(models))
            habit.calls = habit.in_a_row = 0
            habit.enough = min(2 * habit.enough, _MOST_ENOUGH)


class PresentedLease:
    """The state of one request's lease, which its token names. Thread-safe."""

    def __init__(
        self, given: RequestLease, nodes: Nodes, habits: Habits | None, claimed: ClaimedLease
    ) -> None:
        """Without habits the lease is kept until the request ends, or longer.

        `claimed` has what an earlier request with the same token has claimed.
        """
        # `given` itself is not stored: it is the weak key under which this object is kept.
        self._token, self._claims = given.token, given.claims
        self._models = given.models  # grows as the request calls more of them
        self._nodes = nodes
        self._habits = habits
        self.asking = threading.Lock()
        self._claimed = claimed
        # By what leases are asked for: the token, or the number of a lease that came later.
        self._named: dict[str, Any] = {"token": given.token}
        self._counting = threading.Lock()
        self._calls = 0
        self._running = 0
        self._is_first = True  # no lease of this request was given back early
        self._returned: frozenset[str] | None = None  # the models called before one was
        self._unusable = False

    def lease_for(self, batch: int, bring: Bring) -> SessionLease | None:
        """Return the request's lease; None if it has ended, or its node cannot be reached."""
        if self._unusable:
            return None
        try:
            model, lease = self._find(bring)
            if lease is None or not lease.in_force:
                with self.asking:
                    model, lease = self._acquire(batch, bring)
            return SessionLease(model, lease, self)
        except RemoteFailure as failure:
            if failure.failure != FailureKind.LEASE:
                raise
            log.info("this request's lease is no longer in force: %s", failure)
        except WireError as error:
            log.warning("this request's lease cannot be used: %s", error)
        self._unusable = True
        return None

    def begin_call(self) -> None:
        with self._counting:
            self._running += 1

    def end_call(self, *, answered: bool) -> None:
        """Give the lease back if the call is predicted to be the last."""
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
        if self._habits is not None and self._calls and not self._unusable:
            self._habits.finished(self._models, self._calls)
        for lease in list(self._claimed.leases.values()):
            lease.peer.send_dropped()  # no call may follow for long

    # -- inside ------------------------------------------------------------------------------

    def _find(self, bring: Bring) -> tuple[ModelImage, ModelLease | None]:
        """Return the model, and the latest lease for it that this process knows."""
        claimed = self._claimed
        if claimed.session is None:
            claimed.session = self._nodes.holder(self._token, self._claims.node)
        session, claims = claimed.session, self._claims
        model = bring(session)
        lease = claimed.leases.get(model.digest)
        if lease is None and claims.lease and self._is_first:
            lease = session.lease_ahead(claims.lease, claims.gpu, model.digest)
            if lease is not None:
                lease = claimed.leases.setdefault(model.digest, lease)
        return model, lease

    def _acquire(self, batch: int, bring: Bring) -> tuple[ModelImage, ModelLease]:
        """Acquire the model's lease, unless another thread has done so since; `asking` is held.

        If the lease was given back after a wrong prediction, the request gets another one, on any
        node.
        """
        claimed, again = self._claimed, self._returned is not None
        if self._returned is not None and self._habits is not None:
            self._habits.note_wrong_guess(self._returned)
            self._returned, claimed.leases = None, {}
        model, former = self._find(bring)
        if former is not None and former.in_force:
            return model, former
        session = claimed.session
        assert session is not None, "a model was brought to its node"
        if former is not None:
            session.forget_worker(self._claims.gpu, model.digest)
        granted = session.acquire(model.digest, batch, again=again, **self._named)
        if isinstance(granted, ModelLease):
            lease = granted
        else:
            model, lease = _follow(self._nodes, session, granted, batch, bring)
        if again:
            claimed.session, self._named = lease.session, {"lease": lease.number}
        claimed.leases[model.digest] = lease
        return model, lease

    def _is_last(self) -> bool:
        habits = self._habits if self._is_first and self._claimed.leases else None
        return habits is not None and habits.calls(self._models) == self._calls

    def _give_back(self) -> None:
        session, leases = self._claimed.session, list(self._claimed.leases.values())
        assert session is not None, "a call was answered"
        self._returned, self._is_first = frozenset(self._models), False
        try:
            session.give_back(leases, self._claims.request)
        except WireError as error:
            log.info("a lease was not given back, because it has ended: %s", error)


class ProcessLeases:
    """The leases of this process. Thread-safe."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._habits = Habits()
        self._lock = threading.Lock()
        # Without the model's image, with which weights stay alive.
        self._acquired: dict[str, ModelLease] = {}
        self._acquiring: dict[str, threading.Lock] = {}
        # What was claimed by tokens of leases that stand: several requests bring the same one.
        self.claimed_by = functools.lru_cache(_MOST_CLAIMS)(lambda _token: ClaimedLease())
        self._presented: WeakKeyDictionary[RequestLease, PresentedLease] = WeakKeyDictionary()

    def lease_for(self, batch: int, bring: Bring) -> SessionLease:
        """Return a lease that this process believes to be in force; wait for one if necessary.

        Raise RemoteFailure if it is refused, WireError if this node's GPU manager is unreachable.
        """
        given = request_context.current()
        presented = None if given is None else self.presented_by(given).lease_for(batch, bring)
        held = presented or self._acquired_lease(batch, bring)
        if held.lease.peer.has_unused:
            self.nodes.sweep_later()
        return held

    def presented_by(self, given: RequestLease) -> PresentedLease:
        """A request's presented lease is created at its first call."""
        with self._lock:
            presented = self._presented.get(given)
            if presented is None:
                stands = given.claims.stands
                claimed = self.claimed_by(given.token) if stands else ClaimedLease()
                habits = None if stands else self._habits
                presented = PresentedLease(given, self.nodes, habits, claimed)
                self._presented[given] = presented
                given.at_end(presented.request_ended)
            return presented

    # -- a lease that this process acquires -------------------------------------------------------

    def _acquired_lease(self, batch: int, bring: Bring) -> SessionLease:
        model = bring(self.nodes.own)
        held = self._in_force(model, bring)
        if held is not None:
            return held
        acquiring = self._acquiring.setdefault(model.digest, threading.Lock())
        # The thread that asks does so for all; when its call's time is up, another one asks on.
        left_s = current_call.seconds_left()
        if not acquiring.acquire(timeout=-1 if left_s is None else left_s):
            raise RemoteFailure(FailureKind.EXPIRED, "the call's time is up")
        try:
            held = self._in_force(model, bring) or self._acquire(model, batch, bring)
            self._acquired[model.digest] = held.lease
            return held
        finally:
            acquiring.release()

    def _in_force(self, model: ModelImage, bring: Bring) -> SessionLease | None:
        lease = self._acquired.get(model.digest)
        if lease is None or not lease.in_force:
            return None
        there = model if lease.session is self.nodes.own else bring(lease.session)
        return SessionLease(there, lease) if there.digest == model.digest else None

    def _acquire(self, model: ModelImage, batch: int, bring: Bring) -> SessionLease:
        """Acquire a lease on this node or, if the scheduler places the request there, another."""
        own = self.nodes.own
        for attempt in range(1, _ATTEMPTS + 1):
            # Work of before would be lost if the request were refused for now.
            granted = own.acquire(model.digest, batch, goes_on=request_context.goes_on())
            if isinstance(granted, ModelLease):
                return SessionLease(model, granted)
            try:
                return SessionLease(*_follow(self.nodes, own, granted, batch, bring))
            except (RemoteFailure, WireError) as error:
                if isinstance(error, RemoteFailure) and error.failure != FailureKind.LEASE:
                    raise
                why = f"on node {granted.node} is unusable: {error}"
                log.warning("lease %d %s", granted.number, why)
                if attempt == _ATTEMPTS:
                    message = f"the lease that the scheduler granted {why}"
                    facts = {"node": granted.node}
                    raise RemoteFailure(FailureKind.LOST, message, facts) from error
            time.sleep(_PAUSE_S * attempt)
        raise AssertionError("the last attempt returns or raises")


class ModelWeights:
    """Weights that are used together, and the image of theirs that a node has taken last."""

    def __init__(self, name: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.name = name
        self.tensors = tensors
        self.lock = threading.Lock()
        self._image: ModelImage | None = None

    def bring(self, session: ManagerSession) -> ModelImage:
        """Return the image after the session's node has it; NoWeights if there are none."""
        image = self._image
        if image is None or image.digest not in session.images:
            with self.lock:
                image = self._image
                if image is None or image.digest not in session.images:
                    image = process_weights.build(self.tensors(), session, image)
                    self._image = image
        return image

    def forget(self, sessions: Iterable[ManagerSession]) -> None:
        """Have the next call send the weights again, which a node no longer has."""
        with self.lock:
            image, self._image = self._image, None
        if image is not None:
            for session in sessions:
                session.images.pop(image.digest, None)


@dataclass(slots=True)
class ModelLeases:
    """The leases for calls with some weights."""

    leases: ProcessLeases
    weights: ModelWeights

    def lease_for(self, batch: int) -> SessionLease:
        """As `ProcessLeases.lease_for`; NoWeights if there are no weights on the GPU."""
        return self.leases.lease_for(batch, self.weights.bring)

    def forget_image(self) -> None:
        self.weights.forget(self.leases.nodes.sessions())


def _follow(
    nodes: Nodes, session: ManagerSession, elsewhere: LeaseElsewhere, batch: int, bring: Bring
) -> tuple[ModelImage, ModelLease]:
    """Claim a lease on the node where the scheduler granted it; release it if that fails."""
    request = request_context.claims_of(elsewhere.token).request
    try:
        there = nodes.reach(elsewhere.addresses, elsewhere.node)
        model = bring(there)
        lease = there.acquire_here(model.digest, batch, elsewhere.token)
    except (RemoteFailure, WireError):
        session.release(elsewhere.number, request)
        raise
    session.report_claimed(elsewhere.number, request)
    return model, lease
