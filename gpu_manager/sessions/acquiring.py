"""Handles a session's requests for GPU time: a lease, its workers, and channels to the workers."""

import asyncio
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from cache_manager.model.ids import ModelId, NodeId
from common.telemetry.traces import trace_of
from common.telemetry.work_context import ABOUT, Work
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.errors import LeaseOver, NoWorker, UnknownImage
from gpu_manager.node.leases import EndReason, Lease
from gpu_manager.node.leases_in_force import sign_of_life
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.sessions.leases import (
    LeasesElsewhere,
    PresentedLeases,
    TakenLease,
    UnclaimedLeases,
)
from gpu_manager.sessions.sessions import ClientSession, fresh_request_id
from gpu_manager.sessions.weight_requests import Library
from scheduler.api import (
    Estimate,
    EventRefused,
    GivenBack,
    LeaseId,
    Placement,
    Request,
    RequestExpired,
    RequestId,
    RequestWithdrawn,
)
from torch_shim.errors import BadFrame
from torch_shim.wire.messages import Acquire, Release

_ATTEMPTS = 3  # workers may die between the grant of a lease and its first use


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

    asked: Acquire
    models: tuple[ModelId, ...]


class Acquiring:
    """Acquires leases for sessions, and opens channels to the leases' workers."""

    def __init__(
        self,
        node: GpuNode,
        scheduling: Scheduling,
        library: Library,
        presented: PresentedLeases,
        elsewhere: LeasesElsewhere,
    ) -> None:
        self._node = node
        self._scheduling = scheduling
        self._library = library
        self._presented = presented
        self._elsewhere = elsewhere
        self._unclaimed = UnclaimedLeases(node, scheduling)
        self._stopping = False

    async def acquire(
        self, session: ClientSession, asked: Acquire, *, local: bool
    ) -> tuple[dict[str, Any], list[socket.socket]]:
        """Wait for a lease; return the answer, and for local shims the ends of new channels."""
        if len(set(asked.models)) < len(asked.models):
            raise BadFrame("models has a digest twice")
        models = tuple(self._library.model(session, digest) for digest in asked.models)
        wanted = _Wanted(asked, models)
        trace = None if asked.trace is None else trace_of(asked.trace)
        work = Work(trace, function=str(session.identity))
        ABOUT.set(work)  # this task does only this work
        granted = await self._grant(session, wanted)
        placement = granted.placement
        work.lease = placement.lease
        answer = {"lease": placement.lease, "gpu": placement.gpu, "hit": placement.hit}
        if granted.request is not None:
            answer["request"] = granted.request
        if placement.node != self._node.name:
            assert granted.request is not None, "a lease elsewhere is of a request of here"
            located = self._elsewhere.answer(session, granted.request, placement)
            return answer | {"queue_s": granted.queue_s, "elsewhere": located}, []
        by_digest = zip(asked.models, map(granted.workers.__getitem__, models), strict=True)
        fresh = [worker for worker in granted.workers.values() if worker.id not in asked.workers]
        ends = [_open_channel(session, worker) for worker in fresh] if local else []
        answer |= {
            "queue_s": granted.queue_s,
            "load_s": granted.load_s,
            "workers": {digest: worker.id for digest, worker in by_digest},
            "fresh": [worker.id for worker in fresh],
        }
        return answer, ends

    def stop(self) -> None:
        self._stopping = True
        self._unclaimed.stop()

    def release(self, session: ClientSession, asked: Release) -> None:
        """End a lease that the session holds; ignore leases of other sessions.

        Of one that several requests share, the named request gives it back, or all of the
        session's. `may_return` counts only for a lease that the session's caller was given: that
        caller reports the end of the request, which nobody reports for the session's own requests.
        """
        lease, request = LeaseId(asked.lease), _named(asked)
        held = self._node.leases.get(lease)
        if held is None:
            self._elsewhere.release(session, lease, request)
            return
        if not held.is_for(session.key, str(session.identity)):
            return
        mine = held.claims_of(session.key)
        names = [name for name in mine if request in (None, name)] if held.is_divided else mine
        given = any(mine[name].given for name in names)
        given |= held.function != "" and not held.is_divided
        may_return = given and asked.may_return
        self._node.leases.give_back(held, names, EndReason.RELEASED, may_return=may_return)

    def locate(self, session: ClientSession, token: str) -> dict[str, Any]:
        """Return the node of a token's lease, and the addresses that the token's signer gave.

        A function must not use an address from its caller, who could send any address.
        """
        claims = self._presented.claims(session, token)
        if claims is None:
            raise LeaseOver("the token has expired")
        addresses = claims.addresses or self._elsewhere.addresses_of(claims.node)
        if not addresses and claims.node != self._node.name:
            raise LeaseOver(f"no address of node {claims.node} is known")
        return {"lease": claims.lease, "node": claims.node, "addresses": list(addresses)}

    def claimed(self, session: ClientSession, asked: Release) -> None:
        self._elsewhere.claimed(session, LeaseId(asked.lease), _named(asked))

    def end_session(self, session: ClientSession) -> None:
        for held in self._node.leases.held_by(session.key):
            self._node.leases.give_back(held, held.claims_of(session.key), EndReason.SESSION_GONE)
        self._elsewhere.end_session(session)

    async def _grant(self, session: ClientSession, wanted: _Wanted) -> Grant:
        asked = wanted.asked
        if asked.again and asked.token is not None:
            request = self._presented.request(session, asked.token)
            return await self._reacquire(session, wanted, request)
        if asked.lease is not None or asked.token is not None:
            named = await self._named_lease(session, wanted)
            if named is not None:
                return named
            raise LeaseOver("the lease has ended, has expired, or is for other models")
        return await self._new_lease(session, wanted)

    async def _named_lease(self, session: ClientSession, wanted: _Wanted) -> Grant | None:
        """Return the lease that the request names; None if it is not usable for these models."""
        asked = wanted.asked
        if asked.lease is not None:
            lease = self._node.leases.get(LeaseId(asked.lease))
            mine = lease is not None and lease.is_for(session.key, str(session.identity))
            return await self._join(lease, wanted) if lease is not None and mine else None
        assert asked.token is not None, "the request has a lease number or a token"
        presented = await self._presented.lease(session, asked.token, wanted.models)
        if presented is None:
            return None
        held, request = presented
        claim = held.claim_of(request)
        if claim is not None and claim.holder == session.key:
            return await self._join(held, wanted)
        asked_s = asyncio.get_running_loop().time()
        placement = _placement(
            held, self._node, hit=bool(self._node.leases.loaded_now(held, wanted.models))
        )
        try:
            workers = await self._claim(session, placement, request, given=True)
        except NoWorker:
            return None
        load_s = asyncio.get_running_loop().time() - asked_s
        return Grant(placement, load_s=load_s, workers=workers)

    async def _reacquire(
        self, session: ClientSession, wanted: _Wanted, request: RequestId
    ) -> Grant:
        """Acquire another lease for a request that gave its last one back too early."""
        asked_s = asyncio.get_running_loop().time()
        try:
            placement = await self._scheduling.wanted(request)
        except (EventRefused, GivenBack) as error:
            raise LeaseOver(f"its request cannot have another lease: {error}") from error
        queue_s = asyncio.get_running_loop().time() - asked_s
        if not set(wanted.models) <= set(placement.models):
            self._scheduling.release(placement.lease, request)
            raise LeaseOver("its request is for other models")
        if placement.node != self._node.name:
            return Grant(placement, request, queue_s)
        self._check_weights(session, wanted, placement, request)
        try:
            workers = await self._claim(session, placement, request, given=True)
        except NoWorker as error:
            raise LeaseOver(f"its request's next lease ended at once: {error}") from error
        load_s = asyncio.get_running_loop().time() - asked_s - queue_s
        return Grant(placement, request, queue_s, load_s, workers)

    async def _new_lease(self, session: ClientSession, wanted: _Wanted) -> Grant:
        """Acquire a new lease for the session, join one that it holds, or take one over."""
        asked_s = asyncio.get_running_loop().time()
        since_s = session.expired_questions.asked_since_s(wanted.models, asked_s)
        request = _request(session, wanted, self._node.name, asked_s)
        request = replace(request, arrived_s=since_s)
        lost = NoWorker(wanted.models[0], "its leases ended before they could be used")
        for _ in range(_ATTEMPTS):
            for held in self._node.leases.held_by(session.key):
                given = any(claim.given for claim in held.claims_of(session.key).values())
                joined = None if given else await self._join(held, wanted)
                if joined is not None:
                    return joined
            if self._stopping:
                raise RequestWithdrawn(request.id, "this GPU manager stops")
            try:
                placement = await self._unclaimed.placed_or_taken(session, wanted.models, request)
            except RequestExpired:
                now_s = asyncio.get_running_loop().time()
                session.expired_questions.expired(wanted.models, since_s, now_s)
                raise
            placed_s = asyncio.get_running_loop().time()
            if isinstance(placement, TakenLease):
                taken = _placement(placement.held, self._node, hit=True)
                return Grant(taken, queue_s=placed_s - asked_s, workers=placement.workers)
            if placement.node != self._node.name:
                return Grant(placement, request.id, placed_s - asked_s)
            try:
                self._check_weights(session, wanted, placement, request.id)
                workers = await self._claim(session, placement, request.id)
            except NoWorker as error:
                lost = error
                continue
            load_s = asyncio.get_running_loop().time() - placed_s
            return Grant(placement, request.id, placed_s - asked_s, load_s, workers)
        raise lost

    def _check_weights(
        self,
        session: ClientSession,
        wanted: _Wanted,
        placement: Placement,
        request: RequestId,
    ) -> None:
        """Raise UnknownImage if weights were dropped meanwhile; the session then resends them."""
        try:
            for digest in wanted.asked.models:
                self._library.model(session, digest)
        except UnknownImage:
            self._scheduling.release(placement.lease, request)
            raise

    async def _join(self, held: Lease, wanted: _Wanted) -> Grant | None:
        """Return a lease that the session holds already; None if not usable for these models.

        The session needs another channel for another thread; or its worker has died, which this
        manager may not have noticed yet, so the worker is checked for a sign of life.
        """
        workers = self._node.leases.loaded_now(held, wanted.models)
        if not workers:
            return None
        unknown = [worker for worker in workers.values() if worker.id not in wanted.asked.workers]
        await asyncio.gather(*(sign_of_life(worker) for worker in unknown))
        if self._node.leases.loaded_now(held, wanted.models) != workers:
            return None
        return Grant(_placement(held, self._node, hit=True), workers=workers)

    async def _claim(
        self,
        session: ClientSession,
        placement: Placement,
        request: RequestId,
        *,
        given: bool = False,
    ) -> dict[ModelId, HostedModel]:
        """Wait for the workers of a new lease and claim it; give it back if that fails."""
        try:
            workers = await self._node.leases.when_loaded(placement, request)
            if self._stopping:
                raise NoWorker(placement.models[0], "this GPU manager stops")
            claimed = self._node.leases.claim(
                placement.lease, session.key, workers.values(), request, given=given
            )
            if not claimed:
                raise NoWorker(placement.models[0], "its lease has ended, or is another session's")
        except BaseException:
            held = self._node.leases.get(placement.lease)
            claim = None if held is None else held.claim_of(request)
            if held is not None and claim is not None and claim.holder in (None, session.key):
                self._node.leases.give_back(held, (request,), EndReason.RELEASED)
            raise
        return workers


def _named(asked: Release) -> RequestId | None:
    """Return the request that a shim names with its lease; None: all that has it."""
    return None if asked.request is None else RequestId(asked.request)


def _request(session: ClientSession, wanted: _Wanted, near: NodeId, now_s: float) -> Request:
    """Return the request for the scheduler; a client's request id gets the function's prefix."""
    asked, left_s = wanted.asked, wanted.asked.deadline_s
    own = f"{session.identity}/{asked.request}"
    return Request(
        id=RequestId(fresh_request_id(session.key) if asked.request is None else own),
        function=str(session.identity),
        models=wanted.models,
        batch=asked.batch,
        deadline_s=None if left_s is None else now_s + left_s,
        near=near,
        own=True,
        goes_on=asked.goes_on,
    )


def _placement(held: Lease, node: GpuNode, *, hit: bool) -> Placement:
    estimate = Estimate(0.0, 0.0)
    return Placement(held.id, held.gpu, node.name, held.live.slot, held.models, hit, estimate)


def _open_channel(session: ClientSession, hosted: HostedModel) -> socket.socket:
    ours, workers = socket.socketpair()
    hosted.channel(session.key, str(session.identity), workers)
    return ours
