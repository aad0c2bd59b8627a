"""Leases that a session need not ask for: presented as tokens, on other nodes, or unclaimed."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.errors import ClientNotAllowed, PlacedElsewhere
from gpu_manager.node.leases import EndReason, Lease, SessionKey
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.sessions.sessions import ClientSession
from scheduler.api import (
    BadToken,
    LeaseClaims,
    LeaseId,
    LeaseTokens,
    NodeId,
    Placement,
    Request,
    RequestId,
    addresses_for_token,
)

log = logging.getLogger(__name__)

# The token comes with the request, the grant from the scheduler: the grant may be this much later.
_GRANT_DELAY_S = 2.0
# A token's expiry limits the claim of its lease, but not the use of its request's id.
_NEVER_EXPIRED_S = float("-inf")


class PresentedLeases:
    """Finds the lease of a token, if the token belongs to the session's function."""

    def __init__(self, node: GpuNode, tokens: LeaseTokens) -> None:
        self._node = node
        self._tokens = tokens

    async def lease(
        self, session: ClientSession, token: str, models: tuple[ModelId, ...]
    ) -> tuple[Lease, RequestId] | None:
        """Return the lease once it is in force, and the request that the token names.

        None if it has ended or lacks these models. Raise ClientNotAllowed if the token is forged,
        or belongs to another function.
        """
        claims = self.claims(session, token)
        if claims is None or claims.node != self._node.name:
            return None
        held = await self._arrived(claims)
        if held is None or held.ending is not None:
            return None
        if not set(models) <= set(held.models):
            self._release_unfit(held, claims.request)
            return None
        return (held, claims.request) if held.is_free_for(session.key, claims.request) else None

    def request(self, session: ClientSession, token: str) -> RequestId:
        """Return the request of a token, even if its lease was given back long ago.

        Raise ClientNotAllowed if the token is forged, or belongs to another function.
        """
        claims = self.claims(session, token, _NEVER_EXPIRED_S)
        assert claims is not None, "no token expires at minus infinity"
        return claims.request

    def claims(
        self, session: ClientSession, token: str, now_s: float | None = None
    ) -> LeaseClaims | None:
        """Return a token's claims about its lease, on any node; None if the token has expired.

        Raise ClientNotAllowed if the token is forged, or belongs to another function.
        """
        try:
            claims = self._tokens.verify(token, time.time() if now_s is None else now_s)
        except BadToken as error:
            if error.late:
                log.info("a lease token of %s has expired: %s", session.identity, error)
                return None
            raise ClientNotAllowed(f"the lease token is not valid: {error}") from error
        if claims.function != str(session.identity):
            raise ClientNotAllowed(f"the lease token belongs to {claims.function}")
        return claims

    def _release_unfit(self, held: Lease, request: RequestId) -> None:
        """Release an unclaimed lease that lacks the models that its request needs.

        Otherwise as many such requests as there are GPUs would block each other.
        """
        claim = held.claim_of(request)
        if claim is not None and claim.holder is None:
            self._node.leases.give_back(held, (request,), EndReason.UNFIT)

    async def _arrived(self, claims: LeaseClaims) -> Lease | None:
        """Wait for the lease's grant; return None if the lease has ended or is not granted."""
        loop, leases = asyncio.get_running_loop(), self._node.leases
        deadline_s = loop.time() + _GRANT_DELAY_S
        while leases.get(claims.lease) is None and leases.latest < claims.lease:
            if not await self._node.leases.granted.wait(deadline_s - loop.time()):
                break
        held = leases.get(claims.lease)
        if held is None:
            leases.patience.asked_for(claims.lease, loop.time())
        return held


# Leases that no session has claimed: one of their function that waits for a lease takes them over.
#
# The caller of a function may have a lease for a call that waits for a thread, while the calls
# that have the threads wait for a GPU, behind it: nobody would compute until that lease is given
# up.

_LONGEST_S = 60.0


class TakenLease(NamedTuple):
    """A lease that a session has taken over, and the workers of the models that it wants."""

    held: Lease
    workers: Mapping[ModelId, HostedModel]


@dataclass(slots=True, eq=False)
class _WaitingSession:
    session: ClientSession
    models: tuple[ModelId, ...]
    placing: asyncio.Future[Placement]
    taken: asyncio.Future[TakenLease]

    def takes(self, held: Lease) -> bool:
        if self.placing.done() or self.taken.done():
            return False
        mine = held.function == str(self.session.identity)
        return mine and all(model in held.models for model in self.models)


class UnclaimedLeases:
    """Gets leases for sessions: of the scheduler, or such that nobody else has claimed."""

    def __init__(self, node: GpuNode, scheduling: Scheduling) -> None:
        self._node = node
        self._scheduling = scheduling
        self._pass_on_s = node.leases.times.pass_on_s
        self._waiting: dict[_WaitingSession, None] = {}  # the one that has waited the longest first
        self._watching = BackgroundTasks(log, "the watch of unclaimed leases")

    async def placed_or_taken(
        self, session: ClientSession, models: tuple[ModelId, ...], request: Request
    ) -> Placement | TakenLease:
        """Wait for a lease of this request, or for one here that the session then has claimed.

        A lease is passed on once it is unclaimed for a moment, to a session that has waited for as
        long: most calls come at once for theirs. The request of that session ends.
        """
        loop = asyncio.get_running_loop()
        placing = loop.create_task(self._scheduling.acquire(request))
        waiting = _WaitingSession(session, models, placing, loop.create_future())
        try:
            await asyncio.wait({placing}, timeout=self._pass_on_s)
            if not placing.done():
                await self._until_either(waiting)
            if not waiting.taken.done():
                return placing.result()
        except BaseException:
            if waiting.taken.done():
                self._node.leases.give_back(waiting.taken.result().held, (), EndReason.RELEASED)
            self._withdraw(placing, request)
            raise
        self._withdraw(placing, request)
        return waiting.taken.result()

    def stop(self) -> None:
        self._watching.cancel()

    def _withdraw(self, placing: asyncio.Task[Placement], request: Request) -> None:
        """End a request that is no longer needed, whether or not it has a lease by now."""

        def ended(task: asyncio.Task[Placement]) -> None:
            if not task.cancelled() and task.exception() is None:
                self._scheduling.release(task.result().lease, request.id)

        placing.cancel()
        placing.add_done_callback(ended)

    async def _until_either(self, waiting: _WaitingSession) -> None:
        self._waiting[waiting] = None
        if len(self._waiting) == 1:
            self._watching.start(self._watch())
        else:
            self._look()
        try:
            either = (waiting.placing, waiting.taken)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._waiting[waiting]
            if not self._waiting:
                self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            await self._node.leases.granted.wait(self._look())

    def _look(self) -> float:
        """Pass on what is unclaimed for long enough; return the seconds until the next lease is."""
        now_s, next_s = asyncio.get_running_loop().time(), _LONGEST_S
        for held in self._node.leases:
            if not held.is_unclaimed:
                continue
            since_s = now_s if held.loaded_s is None else held.loaded_s
            left_s = since_s + self._pass_on_s - now_s
            if left_s > 0:
                next_s = min(next_s, left_s)
            else:
                self._pass_on(held)
        return next_s

    def _pass_on(self, held: Lease) -> None:
        waiting = next((session for session in self._waiting if session.takes(held)), None)
        if waiting is None:
            return
        workers = self._node.leases.loaded_now(held, waiting.models)
        if workers and self._node.leases.claim(held.id, waiting.session.key, workers.values()):
            log.debug("lease %d is passed on to %s", held.id, waiting.session.key)
            waiting.taken.set_result(TakenLease(held, workers))


# The number of unclaimed leases remembered for a session; older ones are forgotten.
REMEMBERED = 64
# After this time a lease counts as claimed, even without a report: the other node ends it when the
# session there ends, or if no session claims it.
UNREPORTED_S = 30.0


# A lease, and the request that has it, perhaps with others.
_Part = tuple[LeaseId, RequestId]


class LeasesElsewhere:
    """Sends sessions to leases on other nodes, and ends leases that they do not claim there."""

    def __init__(
        self,
        scheduling: Scheduling,
        tokens: LeaseTokens,
        neighbours: Attachment | None,
        token_s: float,
    ) -> None:
        self._scheduling = scheduling
        self._tokens = tokens
        self._neighbours = neighbours
        self._token_s = token_s
        # Leases that may be unclaimed, with the time of the answer to the session; oldest first.
        self._leases: dict[SessionKey, dict[_Part, float]] = {}

    def __len__(self) -> int:
        return sum(len(parts) for parts in self._leases.values())

    def answer(
        self, session: ClientSession, request: RequestId, placement: Placement
    ) -> dict[str, Any]:
        """Return the lease's node, addresses and token; raise PlacedElsewhere without addresses."""
        neighbours = self._neighbours
        addresses = self.addresses_of(placement.node)
        if neighbours is None or not addresses:
            self._scheduling.release(placement.lease, request)
            raise PlacedElsewhere(placement.models[0], placement.node)
        claims = LeaseClaims(
            lease=placement.lease,
            request=request,
            function=str(session.identity),
            node=placement.node,
            gpu=placement.gpu,
            slot=placement.slot,
            term=neighbours.term,
            expires_s=time.time() + self._token_s,
            addresses=addresses_for_token(addresses),
        )
        self._remember(session.key, (placement.lease, request))
        token = self._tokens.sign(claims)
        return {"node": placement.node, "addresses": list(addresses), "token": token}

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        return () if self._neighbours is None else self._neighbours.addresses_of(node)

    def claimed(
        self, session: ClientSession, lease: LeaseId, request: RequestId | None = None
    ) -> None:
        """Forget a lease that the session has claimed: from now on the other node ends it."""
        self._forget(session.key, lease, request)

    def release(
        self, session: ClientSession, lease: LeaseId, request: RequestId | None = None
    ) -> None:
        """Give back a lease that the session did not reach, or no longer needs."""
        for part in self._forget(session.key, lease, request):
            self._scheduling.release(*part)

    def end_session(self, session: ClientSession) -> None:
        since_s = time.monotonic() - UNREPORTED_S
        for part, answered_s in self._leases.pop(session.key, {}).items():
            if answered_s > since_s:
                self._scheduling.release(*part)

    def _remember(self, key: SessionKey, part: _Part) -> None:
        parts = self._leases.setdefault(key, {})
        parts[part] = time.monotonic()
        if len(parts) > REMEMBERED:
            del parts[next(iter(parts))]

    def _forget(self, key: SessionKey, lease: LeaseId, request: RequestId | None) -> list[_Part]:
        """Forget an unclaimed lease, of all requests if none is named; return what was known."""
        parts = self._leases.get(key, {})
        forgotten = [part for part in parts if part[0] == lease and request in (None, part[1])]
        for part in forgotten:
            del parts[part]
        if not parts:
            self._leases.pop(key, None)
        return forgotten
