"""Leases that a session has not asked for itself, or not here: unclaimed ones, and elsewhere."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.errors import PlacedElsewhere
from gpu_manager.node.leases import EndReason, Lease, SessionKey
from gpu_manager.node.leases_in_force import LeasesInForce
from gpu_manager.sessions.sessions import ClientSession
from scheduler.api import (
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

_LONGEST_S = 60.0


@dataclass(slots=True, eq=False)
class _WaitingSession:
    session: ClientSession
    models: tuple[ModelId, ...]
    placing: asyncio.Future[Placement]
    taken: asyncio.Future[Lease]

    def takes(self, held: Lease) -> bool:
        if self.placing.done() or self.taken.done():
            return False
        mine = held.function == str(self.session.identity)
        return mine and all(model in held.models for model in self.models)


class UnclaimedLeases:
    """Gets leases for sessions: of the scheduler, or such that nobody else has claimed.

    The caller of a function may have a lease for a call that waits for a thread, while the calls
    that have the threads wait for a GPU, behind it: nobody would compute until it is given up.
    """

    def __init__(self, leases: LeasesInForce, scheduling: Scheduling) -> None:
        self._leases = leases
        self._scheduling = scheduling
        self._pass_on_s = leases.times.pass_on_s
        self._waiting: dict[_WaitingSession, None] = {}  # the one that has waited the longest first
        self._watching = BackgroundTasks(log, "the watch of unclaimed leases")

    async def placed_or_taken(
        self, session: ClientSession, models: tuple[ModelId, ...], request: Request
    ) -> Placement | Lease:
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
                self._leases.give_back(waiting.taken.result(), (), EndReason.RELEASED)
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
            await self._leases.granted.wait(self._look())

    def _look(self) -> float:
        """Pass on what is unclaimed for long enough; return the seconds until the next lease is."""
        now_s, next_s = asyncio.get_running_loop().time(), _LONGEST_S
        for held in self._leases:
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
        workers = self._leases.loaded_now(held, waiting.models)
        if workers and self._leases.claim(held.id, waiting.session.key, workers.values()):
            log.debug("lease %d is passed on to %s", held.id, waiting.session.key)
            waiting.taken.set_result(held)


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
