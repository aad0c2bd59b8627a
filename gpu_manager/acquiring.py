"""A session's requests for GPU time: waiting for a lease, its workers, and channels to them."""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from cache_manager.model import ModelId
from gpu_manager import fields as read
from gpu_manager.errors import NoWorker, PlacedElsewhere
from gpu_manager.fields import Fields
from gpu_manager.leases import Held, Why
from gpu_manager.node import Node
from gpu_manager.ports import Scheduling
from gpu_manager.presented import PresentedLeases
from gpu_manager.runtime import Hosted
from gpu_manager.sessions import Session, fresh_request_id
from gpu_manager.weight_requests import Library
from scheduler.api import Cancelled, Estimate, LeaseId, Placement, Request, RequestId

_ATTEMPTS = 3  # workers may die between the grant of a lease and its first use


@dataclass(frozen=True, slots=True)
class Granted:
    """What a session is told of its lease; `times` are seconds in the queue and of loading."""

    placement: Placement
    workers: dict[ModelId, Hosted]
    times: tuple[float, float]


class Acquiring:
    """Gives sessions what the scheduler decides."""

    def __init__(
        self, node: Node, scheduling: Scheduling, library: Library, presented: PresentedLeases
    ) -> None:
        self._node = node
        self._scheduling = scheduling
        self._library = library
        self._presented = presented
        self._stopping = False

    async def acquire(
        self, session: Session, fields: Fields, *, local: bool
    ) -> tuple[dict[str, Any], list[socket.socket]]:
        """Wait for a lease; the answer, and the shim's ends of new channels where local."""
        digests = read.digests(fields, "models")
        known = set(read.texts(fields, "workers"))
        models = {digest: self._library.model(session, digest) for digest in digests}
        granted = await self._granted(session, fields, tuple(models.values()), known)
        workers = {digest: granted.workers[model] for digest, model in models.items()}
        fresh = [found for found in granted.workers.values() if found.worker_id not in known]
        ends = [_open_channel(session, found) for found in fresh] if local else []
        placement = granted.placement
        answer = {
            "lease": placement.lease,
            "gpu": placement.gpu,
            "hit": placement.hit,
            "queue_s": granted.times[0],
            "load_s": granted.times[1],
            "workers": {digest: found.worker_id for digest, found in workers.items()},
            "fresh": [found.worker_id for found in fresh],
        }
        return answer, ends

    def stop(self) -> None:
        """Give no lease any more."""
        self._stopping = True

    def release(self, session: Session, fields: Fields) -> None:
        """End a lease that the session holds; another one's is left alone."""
        held = self._node.leases.get(LeaseId(read.whole(fields, "lease")))
        if held is not None and held.holder == session.key:
            self._node.release(held, Why.RELEASED)

    def ended(self, session: Session) -> None:
        """A session is gone: so are its leases."""
        for held in self._node.leases.held_by(session.key):
            self._node.release(held, Why.SESSION_GONE)

    async def _granted(
        self, session: Session, fields: Fields, models: tuple[ModelId, ...], known: set[str]
    ) -> Granted:
        asked_s = asyncio.get_running_loop().time()
        request = _request(session, fields, models, asked_s)
        token = read.text_or_none(fields, "token")
        lost = NoWorker(models[0], "its leases ended before they could be used")
        for _ in range(_ATTEMPTS):
            placement = await self._brought(session, models, token)
            token = None
            joined = None if placement is not None else await self._joined(session, models, known)
            if joined is not None:
                return joined
            if self._stopping:
                raise Cancelled(request.id, "this GPU manager stops")
            placement = placement or await self._placed(request)
            placed_s = asyncio.get_running_loop().time()
            try:
                workers = await self._claimed(session, placement)
            except NoWorker as error:
                lost = error
                continue
            ready_s = asyncio.get_running_loop().time()
            return Granted(placement, workers, (placed_s - asked_s, ready_s - placed_s))
        raise lost

    async def _brought(
        self, session: Session, models: tuple[ModelId, ...], token: str | None
    ) -> Placement | None:
        """The lease that the session's caller was given for it, unless it was claimed already."""
        held = None if token is None else await self._presented.lease(session, token, models)
        if held is None or held.holder is not None:
            return None
        return _placement(held, self._node, hit=bool(self._node.workers_now(held, models)))

    async def _placed(self, request: Request) -> Placement:
        """A lease on this node, as the scheduler gives it."""
        placement = await self._scheduling.acquire(request)
        if placement.node != self._node.name:
            self._scheduling.release(placement.lease)
            raise PlacedElsewhere(placement.models[0], placement.node)
        return placement

    async def _joined(
        self, session: Session, models: tuple[ModelId, ...], known: set[str]
    ) -> Granted | None:
        """The lease of these models that the session holds already.

        It wants another channel for another thread; or its worker died and it was the first to
        notice, so the worker is asked for a sign of life.
        """
        for held in self._node.leases.held_by(session.key):
            workers = self._node.workers_now(held, models)
            if not workers:
                continue
            strange = [found for found in workers.values() if found.worker_id not in known]
            await asyncio.gather(*(self._node.sign_of_life(found) for found in strange))
            if self._node.workers_now(held, models) == workers:
                return Granted(_placement(held, self._node, hit=True), workers, (0.0, 0.0))
        return None

    async def _claimed(self, session: Session, placement: Placement) -> dict[ModelId, Hosted]:
        """Wait for the workers of a new lease; the lease ends where they do not come."""
        try:
            workers = await self._node.workers(placement)
            if self._stopping:
                raise NoWorker(placement.models[0], "this GPU manager stops")
            if not self._node.claim(placement.lease, session.key, workers.values()):
                raise NoWorker(placement.models[0], "its lease has ended")
        except BaseException:
            held = self._node.leases.get(placement.lease)
            if held is not None:
                self._node.release(held, Why.RELEASED)
            raise
        return workers


def _request(
    session: Session, fields: Fields, models: tuple[ModelId, ...], now_s: float
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
    )


def _placement(held: Held, node: Node, *, hit: bool) -> Placement:
    estimate = Estimate(0.0, 0.0)
    return Placement(held.id, held.gpu, node.name, held.slot, held.models, hit, estimate)


def _open_channel(session: Session, hosted: Hosted) -> socket.socket:
    """A new channel to a worker: the shim's end."""
    ours, workers = socket.socketpair()
    hosted.channel(session.key, session.identity.function, workers)
    return ours
