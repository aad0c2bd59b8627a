"""A session's requests for GPU time: waiting for a lease, its workers, and channels to them."""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from cache_manager.model.ids import ModelId, NodeId
from common.telemetry.traces import TraceContext, trace_of
from common.telemetry.work_context import ABOUT, Work
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.errors import LeaseOver, NoWorker, UnknownImage
from gpu_manager.node.lease_endings import sign_of_life
from gpu_manager.node.leases_in_force import EndReason, LeaseInForce
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.sessions.leases_elsewhere import LeasesElsewhere
from gpu_manager.sessions.presented_leases import PresentedLeases
from gpu_manager.sessions.sessions import ClientSession, fresh_request_id
from gpu_manager.sessions.weight_requests import Library
from gpu_manager.wire import request_fields as read
from gpu_manager.wire.request_fields import Fields
from scheduler.api import (
    Estimate,
    EventRefused,
    GivenBack,
    LeaseId,
    Placement,
    Request,
    RequestId,
    RequestWithdrawn,
)

_ATTEMPTS = 3  # workers may die between the grant of a lease and its first use


@dataclass(frozen=True, slots=True)
class LocalGrant:
    """A lease on this node, with its workers; `times` are seconds in the queue and of loading.

    `request` is that which was made for it just now, if one was.
    """

    placement: Placement
    workers: dict[ModelId, HostedModel]
    times: tuple[float, float]
    request: RequestId | None = None


@dataclass(frozen=True, slots=True)
class RemoteGrant:
    """A lease on another node; the request, and the seconds that it was in the queue."""

    request: RequestId
    placement: Placement
    queue_s: float


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a session asks for.

    `known` are workers to which it has a channel, `lease` is one for which it wants another channel
    and nothing else, `token` one that its caller was given. A session that would `follow` learns
    where a lease on another node is, and gets no lease that it did not ask for where the one that
    it named is over. `again`: the token's lease was given back early, and its request wants one.
    """

    digests: tuple[str, ...]
    models: tuple[ModelId, ...]
    known: frozenset[str]
    lease: LeaseId | None
    token: str | None
    follow: bool
    again: bool


class Acquiring:
    """Gives sessions what the scheduler decides."""

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
        self._stopping = False

    async def acquire(
        self, session: ClientSession, fields: Fields, *, local: bool
    ) -> tuple[dict[str, Any], list[socket.socket]]:
        """Wait for a lease; the answer, and the shim's ends of new channels where local."""
        wish = self._wish(session, fields)
        work = Work(_trace(fields), function=str(session.identity))
        ABOUT.set(work)  # nothing else is done in this task
        granted = await self._granted(session, fields, wish)
        placement = granted.placement
        work.lease = placement.lease
        answer = {"lease": placement.lease, "gpu": placement.gpu, "hit": placement.hit}
        if granted.request is not None:
            answer["request"] = granted.request
        if isinstance(granted, RemoteGrant):
            where = self._elsewhere.answer(session, granted.request, placement)
            return answer | {"queue_s": granted.queue_s, "elsewhere": where}, []
        workers = dict(zip(wish.digests, wish.models, strict=True))
        found = {digest: granted.workers[model] for digest, model in workers.items()}
        fresh = [each for each in granted.workers.values() if each.id not in wish.known]
        ends = [_open_channel(session, each) for each in fresh] if local else []
        answer |= {
            "queue_s": granted.times[0],
            "load_s": granted.times[1],
            "workers": {digest: each.id for digest, each in found.items()},
            "fresh": [each.id for each in fresh],
        }
        return answer, ends

    def stop(self) -> None:
        """Give no lease any more."""
        self._stopping = True

    def release(self, session: ClientSession, fields: Fields) -> None:
        """End a lease that the session holds; another one's is left alone.

        A request may return for another lease after one that its caller was given, for its caller
        reports its end; the end of one that the session asked for would not be reported.
        """
        lease = LeaseId(read.whole(fields, "lease"))
        held = self._node.leases.get(lease)
        if held is None:
            self._elsewhere.release(session, lease)
        elif held.holder == session.key:
            if held.given and read.flag(fields, "may_return", default=False):
                self._scheduling.release(lease, may_return=True)
            self._node.release(held, EndReason.RELEASED)

    def where(self, session: ClientSession, fields: Fields) -> dict[str, Any]:
        """The node of a token's lease, and the addresses that the token's signer gave.

        Whoever calls a function hands it the token, and could name any address beside it.
        """
        claims = self._presented.claims(session, read.token(fields, "token"))
        if claims is None:
            raise LeaseOver("the token came too late")
        addresses = claims.addresses or self._elsewhere.addresses_of(claims.node)
        if not addresses and claims.node != self._node.name:
            raise LeaseOver(f"nobody said where functions find node {claims.node}")
        return {"lease": claims.lease, "node": claims.node, "addresses": list(addresses)}

    def claimed(self, session: ClientSession, fields: Fields) -> None:
        """The session has claimed a lease elsewhere: that node ends it."""
        self._elsewhere.claimed(session, LeaseId(read.whole(fields, "lease")))

    def ended(self, session: ClientSession) -> None:
        """A session is gone: so are its leases."""
        for held in self._node.leases.held_by(session.key):
            self._node.release(held, EndReason.SESSION_GONE)
        self._elsewhere.ended(session)

    def _wish(self, session: ClientSession, fields: Fields) -> _Wish:
        digests = read.digests(fields, "models")
        lease = read.whole_or_none(fields, "lease")
        return _Wish(
            digests=digests,
            models=tuple(self._library.model(session, digest) for digest in digests),
            known=frozenset(read.texts(fields, "workers")),
            lease=None if lease is None else LeaseId(lease),
            token=read.token_or_none(fields, "token"),
            follow=read.flag(fields, "follow", default=False),
            again=read.flag(fields, "again", default=False),
        )

    async def _granted(
        self, session: ClientSession, fields: Fields, wish: _Wish
    ) -> LocalGrant | RemoteGrant:
        if wish.again and wish.token is not None:
            return await self._again(session, wish, self._presented.request(session, wish.token))
        if wish.lease is not None or wish.token is not None:
            named = await self._named(session, wish)
            if named is not None:
                return named
            if wish.follow or wish.lease is not None:
                raise LeaseOver("the lease has ended, came too late, or is for other models")
        return await self._asked(session, fields, wish)

    async def _named(self, session: ClientSession, wish: _Wish) -> LocalGrant | None:
        """The lease that the session or its caller has, if it is good for these models."""
        if wish.lease is not None:
            held = self._node.leases.get(wish.lease)
            held = held if held is not None and held.holder == session.key else None
        else:
            assert wish.token is not None, "it names a lease in one way or the other"
            held = await self._presented.lease(session, wish.token, wish.models)
        if held is None:
            return None
        if held.holder is not None:
            return await self._joined(held, wish)
        asked_s = asyncio.get_running_loop().time()
        placement = _placement(held, self._node, hit=bool(self._node.loaded_now(held, wish.models)))
        try:
            workers = await self._claimed(session, placement, given=True)
        except NoWorker:
            return None
        return LocalGrant(placement, workers, (0.0, asyncio.get_running_loop().time() - asked_s))

    async def _again(
        self, session: ClientSession, wish: _Wish, request: RequestId
    ) -> LocalGrant | RemoteGrant:
        """Another lease for a request that gave its last one back too early."""
        asked_s = asyncio.get_running_loop().time()
        try:
            placement = await self._scheduling.wanted(request)
        except (EventRefused, GivenBack) as error:
            raise LeaseOver(f"its request cannot have another lease: {error}") from error
        queue_s = asyncio.get_running_loop().time() - asked_s
        if not set(wish.models) <= set(placement.models):
            self._scheduling.release(placement.lease)
            raise LeaseOver("its request is for other models")
        if placement.node != self._node.name:
            if not wish.follow:
                raise self._elsewhere.given_back(placement)
            return RemoteGrant(request, placement, queue_s)
        self._still_here(session, wish, placement)
        try:
            workers = await self._claimed(session, placement, given=True)
        except NoWorker as error:
            raise LeaseOver(f"its request's next lease ended at once: {error}") from error
        load_s = asyncio.get_running_loop().time() - asked_s - queue_s
        return LocalGrant(placement, workers, (queue_s, load_s), request)

    async def _asked(
        self, session: ClientSession, fields: Fields, wish: _Wish
    ) -> LocalGrant | RemoteGrant:
        """A lease of the session's own, as the scheduler gives it."""
        asked_s = asyncio.get_running_loop().time()
        request = _request(session, fields, wish.models, self._node.name, asked_s)
        lost = NoWorker(wish.models[0], "its leases ended before they could be used")
        for _ in range(_ATTEMPTS):
            for held in self._node.leases.held_by(session.key):
                joined = None if held.given else await self._joined(held, wish)
                if joined is not None:
                    return joined
            if self._stopping:
                raise RequestWithdrawn(request.id, "this GPU manager stops")
            placement = await self._scheduling.acquire(request)
            placed_s = asyncio.get_running_loop().time()
            if placement.node != self._node.name:
                if not wish.follow:
                    raise self._elsewhere.given_back(placement)
                return RemoteGrant(request.id, placement, placed_s - asked_s)
            try:
                self._still_here(session, wish, placement)
                workers = await self._claimed(session, placement)
            except NoWorker as error:
                lost = error
                continue
            ready_s = asyncio.get_running_loop().time()
            times = (placed_s - asked_s, ready_s - placed_s)
            return LocalGrant(placement, workers, times, request.id)
        raise lost

    def _still_here(self, session: ClientSession, wish: _Wish, placement: Placement) -> None:
        """Weights that left while the session waited must be sent again: refuse."""
        try:
            for digest in wish.digests:
                self._library.model(session, digest)
        except UnknownImage:
            self._scheduling.release(placement.lease)
            raise

    async def _joined(self, held: LeaseInForce, wish: _Wish) -> LocalGrant | None:
        """A lease that the session holds already, if it is good for these models.

        It wants another channel for another thread; or its worker died and it was the first to
        notice, so the worker is asked for a sign of life.
        """
        workers = self._node.loaded_now(held, wish.models)
        if not workers:
            return None
        strange = [found for found in workers.values() if found.id not in wish.known]
        await asyncio.gather(*(sign_of_life(found) for found in strange))
        if self._node.loaded_now(held, wish.models) != workers:
            return None
        return LocalGrant(_placement(held, self._node, hit=True), workers, (0.0, 0.0))

    async def _claimed(
        self, session: ClientSession, placement: Placement, *, given: bool = False
    ) -> dict[ModelId, HostedModel]:
        """Wait for the workers of a new lease; the lease ends where they do not come."""
        try:
            workers = await self._node.when_loaded(placement)
            if self._stopping:
                raise NoWorker(placement.models[0], "this GPU manager stops")
            claimed = self._node.claim(placement.lease, session.key, workers.values(), given=given)
            if not claimed:
                raise NoWorker(placement.models[0], "its lease has ended")
        except BaseException:
            held = self._node.leases.get(placement.lease)
            if held is not None:
                self._node.release(held, EndReason.RELEASED)
            raise
        return workers


def _request(
    session: ClientSession, fields: Fields, models: tuple[ModelId, ...], near: NodeId, now_s: float
) -> Request:
    """What the scheduler is asked for; an id of the client's own is kept apart from others'."""
    given_id = read.text_or_none(fields, "request")
    deadline_s = read.seconds_or_none(fields, "deadline_s")
    name = fresh_request_id(session.key) if given_id is None else f"{session.identity}/{given_id}"
    return Request(
        id=RequestId(name),
        function=str(session.identity),
        models=models,
        batch=read.whole(fields, "batch", least=1),
        deadline_s=None if deadline_s is None else now_s + deadline_s,
        near=near,
    )


def _trace(fields: Fields) -> TraceContext | None:
    """That of the graph call which wants the lease; shims of before do not say any."""
    said = read.text_or_none(fields, "trace")
    return None if said is None else trace_of(said)


def _placement(held: LeaseInForce, node: GpuNode, *, hit: bool) -> Placement:
    estimate = Estimate(0.0, 0.0)
    return Placement(held.id, held.gpu, node.name, held.slot, held.models, hit, estimate)


def _open_channel(session: ClientSession, hosted: HostedModel) -> socket.socket:
    """A new channel to a worker: the shim's end."""
    ours, workers = socket.socketpair()
    hosted.channel(session.key, session.identity.function, workers)
    return ours
