"""Handles a session's requests for GPU time: a lease, its workers, and channels to the workers."""

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from cache_manager.model.ids import ModelId
from common.telemetry.traces import trace_of
from common.telemetry.work_context import ABOUT, Work
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.errors import ClientNotAllowed, LeaseOver, NoWorker, PlacedElsewhere, UnknownImage
from gpu_manager.node.leases import EndReason, Lease
from gpu_manager.node.leases_in_force import sign_of_life
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.sessions.sessions import ClientSession, fresh_request_id
from gpu_manager.sessions.weight_requests import Library
from scheduler.api import (
    BadToken,
    Estimate,
    EventRefused,
    GivenBack,
    LeaseClaims,
    LeaseId,
    LeaseTokens,
    NodeId,
    Placement,
    Request,
    RequestExpired,
    RequestId,
    RequestWithdrawn,
    addresses_for_token,
)
from torch_shim.errors import BadFrame
from torch_shim.wire.messages import Acquire, Release

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # workers may die between the grant of a lease and its first use
# The token comes with the request, the grant from the scheduler: the grant may be this much later.
_GRANT_DELAY_S = 2.0
# A token's expiry limits the claim of its lease, but not the use of its request's id.
_NEVER_EXPIRED_S = float("-inf")
_AT_ONCE_S = 1.0  # who asks again within this time has not stopped waiting
# After this time a lease elsewhere counts as claimed, even without a report: the other node ends it
# when the session there ends, or if no session claims it.
UNREPORTED_S = 30.0


class Grant(NamedTuple):
    """A lease, on this node with its workers, or on another one.

    `request` is set if a request was created for this lease.
    """

    placement: Placement
    request: RequestId | None = None
    queue_s: float = 0.0
    load_s: float = 0.0
    workers: Mapping[ModelId, HostedModel] = MappingProxyType({})


class _Wanted(NamedTuple):
    """What a session asked for, and the models of the digests that it named."""

    session: ClientSession
    asked: Acquire
    models: tuple[ModelId, ...]


@dataclass(eq=False)
class Acquiring:
    """Acquires leases for sessions, and opens channels to the leases' workers."""

    node: GpuNode
    scheduling: Scheduling
    library: Library
    tokens: LeaseTokens
    neighbours: Attachment | None  # the other nodes of a cluster, to which sessions may be sent

    def __post_init__(self) -> None:
        self._leases = self.node.leases
        self._loop = asyncio.get_running_loop()
        self._stopping = False

    async def acquire(
        self, session: ClientSession, asked: Acquire, *, local: bool
    ) -> tuple[dict[str, Any], list[int]]:
        """Wait for a lease; return the answer, and for local shims the ends of new channels."""
        if len(set(asked.models)) < len(asked.models):
            raise BadFrame("models has a digest twice")
        models = tuple(self.library.model(session, digest) for digest in asked.models)
        trace = None if asked.trace is None else trace_of(asked.trace)
        work = Work(trace, function=str(session.identity))
        ABOUT.set(work)  # this task does only this work
        grant = await self._grant(_Wanted(session, asked, models))
        placement, request, workers = grant.placement, grant.request, grant.workers
        work.lease = placement.lease
        answer = {"lease": placement.lease, "gpu": placement.gpu, "hit": placement.hit}
        answer["queue_s"] = grant.queue_s
        if request is not None:
            answer["request"] = request
        if placement.node != self.node.name:
            assert request is not None, "a lease elsewhere is of a request of here"
            return answer | {"elsewhere": self._located(session, request, placement)}, []
        fresh = [worker for worker in workers.values() if worker.id not in asked.workers]
        ends = [_open_channel(session, worker) for worker in fresh] if local else []
        by_digest = zip(asked.models, models, strict=True)
        answer["load_s"] = grant.load_s
        answer["workers"] = {digest: workers[model].id for digest, model in by_digest}
        answer["fresh"] = [worker.id for worker in fresh]
        return answer, [end.detach() for end in ends]

    def stop(self) -> None:
        self._stopping = True

    def release(self, session: ClientSession, asked: Release) -> None:
        """End a lease that the session holds, here or elsewhere; ignore those of other sessions.

        Of one that several requests share, the named request gives it back, or all of the
        session's. `may_return` counts only for a lease that the session's caller was given: that
        caller reports the end of the request, which nobody reports for the session's own requests.
        """
        held = self._leases.get(LeaseId(asked.lease))
        if held is None:
            for part in self.forget_elsewhere(session, asked):
                self.scheduling.release(*part)
            return
        if held.is_for(session.key):
            mine = held.claims_of(session.key, asked.request)
            given = held.is_of(session.key) or any(claim.given for claim in mine.values())
            may_return = given and asked.may_return
            self._leases.give_back(held, mine, EndReason.RELEASED, may_return=may_return)

    def locate(self, session: ClientSession, token: str) -> dict[str, Any]:
        """Return the node of a token's lease, and the addresses that the token's signer gave.

        A function must not use an address from its caller, who could send any address.
        """
        claims = self._claims(session, token)
        if claims is None:
            raise LeaseOver("the token has expired")
        addresses = claims.addresses or self._addresses_of(claims.node)
        if not addresses and claims.node != self.node.name:
            raise LeaseOver(f"no address of node {claims.node} is known")
        return {"lease": claims.lease, "node": claims.node, "addresses": list(addresses)}

    def forget_elsewhere(
        self, session: ClientSession, asked: Release
    ) -> list[tuple[LeaseId, RequestId]]:
        """A session gives a lease elsewhere back, or has claimed it: the other node ends it then.

        Return what was known of it: of all its requests if none is named.
        """
        parts = [
            (lease, request)
            for lease, request in session.elsewhere
            if lease == asked.lease and asked.request in (None, request)
        ]
        for part in parts:
            del session.elsewhere[part]
        return parts

    def end_session(self, session: ClientSession) -> None:
        for held in self._leases.held_by(session.key):
            self._leases.give_back(held, held.claims_of(session.key), EndReason.SESSION_GONE)
        since_s = time.monotonic() - UNREPORTED_S
        for part, answered_s in session.elsewhere.items():
            if answered_s > since_s:
                self.scheduling.release(*part)

    def _located(
        self, session: ClientSession, request: RequestId, placement: Placement
    ) -> dict[str, Any]:
        """Return a lease's node, addresses and token; raise PlacedElsewhere without addresses."""
        neighbours, addresses = self.neighbours, self._addresses_of(placement.node)
        if neighbours is None or not addresses:
            self.scheduling.release(placement.lease, request)
            raise PlacedElsewhere(placement.models[0], placement.node)
        claims = LeaseClaims(
            lease=placement.lease,
            request=request,
            function=str(session.identity),
            node=placement.node,
            gpu=placement.gpu,
            slot=placement.slot,
            term=neighbours.term,
            expires_s=time.time() + self._leases.times.unclaimed_s,
            addresses=addresses_for_token(addresses),
        )
        session.elsewhere[placement.lease, request] = time.monotonic()
        token = self.tokens.sign(claims)
        return {"node": placement.node, "addresses": list(addresses), "token": token}

    def _addresses_of(self, node: NodeId) -> tuple[str, ...]:
        return () if self.neighbours is None else self.neighbours.addresses_of(node)

    async def _grant(self, wanted: _Wanted) -> Grant:
        asked, session, grant = wanted.asked, wanted.session, None
        if asked.again and asked.token is not None:
            return await self._reacquire(wanted, asked.token)
        if asked.lease is not None:
            lease = self._leases.get(LeaseId(asked.lease))
            if lease is not None and lease.is_for(session.key):
                grant = await self._join(lease, wanted)
        elif asked.token is not None:
            grant = await self._presented(wanted, asked.token)
        else:
            return await self._new_lease(wanted)
        if grant is None:
            raise LeaseOver("the lease has ended, has expired, or is for other models")
        return grant

    async def _presented(self, wanted: _Wanted, token: str) -> Grant | None:
        """Return the lease of a token once it is in force; None if it cannot be used for these."""
        session, claims = wanted.session, self._claims(wanted.session, token)
        if claims is None or claims.node != self.node.name:
            return None
        lease, request = await self._arrived(claims.lease), claims.request
        claim = None if lease is None or lease.ending is not None else lease.claim_of(request)
        if lease is None or claim is None:
            return None
        if not set(wanted.models) <= set(lease.models):
            # As many requests without a claim as there are GPUs would block each other.
            if claim.holder is None:
                self._leases.give_back(lease, (request,), EndReason.UNFIT)
            return None
        if claim.holder == session.key:
            return await self._join(lease, wanted)
        if lease.free_claim(session.key, request) is None:
            return None
        hit = bool(self._leases.loaded_now(lease, wanted.models))
        try:
            return await self._claim(session, self._placement(lease, hit=hit), request, given=True)
        except NoWorker:
            return None

    async def _arrived(self, number: LeaseId) -> Lease | None:
        """Wait for a lease's grant; return None if the lease has ended or is not granted."""
        leases, deadline_s = self._leases, self._loop.time() + _GRANT_DELAY_S
        while leases.get(number) is None and leases.latest < number:
            if not await leases.granted.wait(deadline_s - self._loop.time()):
                break
        lease = leases.get(number)
        if lease is None:
            leases.patience.asked_for(number, self._loop.time())
        return lease

    def _claims(
        self, session: ClientSession, token: str, now_s: float | None = None
    ) -> LeaseClaims | None:
        """Return a token's claims about its lease, on any node; None if the token has expired.

        Raise ClientNotAllowed if the token is forged, or belongs to another function.
        """
        try:
            claims = self.tokens.verify(token, time.time() if now_s is None else now_s)
        except BadToken as error:
            if error.late:
                log.info("a lease token of %s has expired: %s", session.identity, error)
                return None
            raise ClientNotAllowed(f"the lease token is not valid: {error}") from error
        if claims.function != str(session.identity):
            raise ClientNotAllowed(f"the lease token belongs to {claims.function}")
        return claims

    async def _reacquire(self, wanted: _Wanted, token: str) -> Grant:
        """Acquire another lease for a token's request, which gave its last one back too early."""
        claims = self._claims(wanted.session, token, _NEVER_EXPIRED_S)
        assert claims is not None, "no token expires at minus infinity"
        request, asked_s = claims.request, self._loop.time()
        try:
            placement = await self.scheduling.wanted(request)
        except (EventRefused, GivenBack) as error:
            raise LeaseOver(f"its request cannot have another lease: {error}") from error
        if not set(wanted.models) <= set(placement.models):
            self.scheduling.release(placement.lease, request)
            raise LeaseOver("its request is for other models")
        try:
            return await self._placed(wanted, placement, request, asked_s, given=True)
        except NoWorker as error:
            raise LeaseOver(f"its request's next lease ended at once: {error}") from error

    async def _new_lease(self, wanted: _Wanted) -> Grant:
        """Acquire a new lease for the session, join one that it holds, or take one over.

        The threads of a process ask for a model's lease by one question, which has the time of one
        call. When that is over, the next thread asks, whose call has waited for the same question.
        """
        session, asked_s = wanted.session, self._loop.time()
        since_s, expired_s = session.expired.pop(wanted.models, (asked_s, asked_s))
        if asked_s > expired_s + _AT_ONCE_S:
            since_s = asked_s
        request = self._request(wanted, asked_s, since_s)
        lost = NoWorker(wanted.models[0], "its leases ended before they could be used")
        for _ in range(_ATTEMPTS):
            for lease in self._leases.held_by(session.key):
                given = any(claim.given for claim in lease.claims_of(session.key).values())
                joined = None if given else await self._join(lease, wanted)
                if joined is not None:
                    return joined
            if self._stopping:
                raise RequestWithdrawn(request.id, "this GPU manager stops")
            try:
                return await self._placed_or_taken(wanted, request, asked_s)
            except RequestExpired:
                session.expired[wanted.models] = since_s, self._loop.time()
                raise
            except NoWorker as error:
                lost = error
        raise lost

    async def _placed_or_taken(self, wanted: _Wanted, request: Request, asked_s: float) -> Grant:
        """Wait for a lease of this request, or for one here that the session then has claimed.

        The caller of a function may have a lease for a call that waits for a thread, while the
        calls that have the threads wait for a GPU, behind it: nobody would compute until it is
        given up. It is passed on once it is unclaimed for a moment, to a session that has waited
        for as long: most calls come at once for theirs. The request of that session ends.
        """
        leases, session = self._leases, wanted.session
        placing = self._loop.create_task(self.scheduling.acquire(request))
        try:
            await asyncio.wait({placing}, timeout=leases.times.pass_on_s)
            while not placing.done():
                lease = leases.take_over(session.key, wanted.models)
                if lease is not None:
                    self._withdraw(placing, request)
                    taken, queue_s = self._placement(lease, hit=True), self._loop.time() - asked_s
                    workers = leases.loaded_now(lease, wanted.models)
                    return Grant(taken, queue_s=queue_s, workers=workers)
                either = (placing, leases.offered.next)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self._withdraw(placing, request)
            raise
        return await self._placed(wanted, placing.result(), request.id, asked_s)

    def _withdraw(self, placing: asyncio.Task[Placement], request: Request) -> None:
        """End a request that is no longer needed, whether or not it has a lease by now."""

        def ended(task: asyncio.Task[Placement]) -> None:
            if not task.cancelled() and task.exception() is None:
                self.scheduling.release(task.result().lease, request.id)

        placing.cancel()
        placing.add_done_callback(ended)

    async def _placed(
        self,
        wanted: _Wanted,
        placement: Placement,
        request: RequestId,
        asked_s: float,
        *,
        given: bool = False,
    ) -> Grant:
        """Claim the lease that a request was placed with, unless it is on another node.

        Raise UnknownImage if weights were dropped meanwhile; the session then resends them.
        """
        queue_s = self._loop.time() - asked_s
        if placement.node != self.node.name:
            return Grant(placement, request, queue_s)
        try:
            for digest in wanted.asked.models:
                self.library.model(wanted.session, digest)
        except UnknownImage:
            self.scheduling.release(placement.lease, request)
            raise
        grant = await self._claim(wanted.session, placement, request, given=given)
        return grant._replace(request=request, queue_s=queue_s)

    async def _join(self, lease: Lease, wanted: _Wanted) -> Grant | None:
        """Return a lease that the session holds already; None if not usable for these models.

        The session needs another channel for another thread; or its worker has died, which this
        manager may not have noticed yet, so the worker is checked for a sign of life.
        """
        workers = self._leases.loaded_now(lease, wanted.models)
        if not workers:
            return None
        unknown = [worker for worker in workers.values() if worker.id not in wanted.asked.workers]
        await asyncio.gather(*(sign_of_life(worker) for worker in unknown))
        if self._leases.loaded_now(lease, wanted.models) != workers:
            return None
        return Grant(self._placement(lease, hit=True), workers=workers)

    async def _claim(
        self, session: ClientSession, placement: Placement, request: RequestId, *, given: bool
    ) -> Grant:
        """Wait for the workers of a new lease and claim it; give it back if that fails."""
        leases, number, model = self._leases, placement.lease, placement.models[0]
        began_s = self._loop.time()
        try:
            workers = await leases.when_loaded(placement, request)
            if self._stopping:
                raise NoWorker(model, "this GPU manager stops")
            if not leases.claim(number, session.key, workers.values(), request, given=given):
                raise NoWorker(model, "its lease has ended, or is another session's")
        except BaseException:
            lease = leases.get(number)
            claim = None if lease is None else lease.claim_of(request)
            if lease is not None and claim is not None and claim.holder in (None, session.key):
                leases.give_back(lease, (request,), EndReason.RELEASED)
            raise
        return Grant(placement, load_s=self._loop.time() - began_s, workers=workers)

    def _request(self, wanted: _Wanted, now_s: float, since_s: float) -> Request:
        """Return the scheduler's request; a client's request id gets the function's prefix."""
        session, asked, left_s = wanted.session, wanted.asked, wanted.asked.deadline_s
        own = f"{session.identity}/{asked.request}"
        return Request(
            id=RequestId(fresh_request_id(session.key) if asked.request is None else own),
            function=str(session.identity),
            models=wanted.models,
            batch=asked.batch,
            deadline_s=None if left_s is None else now_s + left_s,
            arrived_s=since_s,
            near=self.node.name,
            own=True,
            goes_on=asked.goes_on,
        )

    def _placement(self, lease: Lease, *, hit: bool) -> Placement:
        node, slot, estimate = self.node.name, lease.live.slot, Estimate(0.0, 0.0)
        return Placement(lease.id, lease.gpu, node, slot, lease.models, hit, estimate)


def _open_channel(session: ClientSession, hosted: HostedModel) -> socket.socket:
    ours, workers = socket.socketpair()
    hosted.channel(session.key, str(session.identity), workers)
    return ours
