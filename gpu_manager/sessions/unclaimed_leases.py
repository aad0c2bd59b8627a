"""Leases that no session has claimed: one of their function that waits for a lease takes them over.

The caller of a function may have a lease for a call that waits for a thread, while the calls that
have the threads wait for a GPU, behind it: nobody would compute until that lease is given up.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.node.leases_in_force import EndReason, LeaseInForce
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.sessions.sessions import ClientSession
from scheduler.api import Placement, Request

log = logging.getLogger(__name__)

_LONGEST_S = 60.0


class TakenLease(NamedTuple):
    """A lease that a session has taken over, and the workers of the models that it wants."""

    held: LeaseInForce
    workers: Mapping[ModelId, HostedModel]


@dataclass(slots=True, eq=False)
class _WaitingSession:
    session: ClientSession
    models: tuple[ModelId, ...]
    placing: asyncio.Future[Placement]
    taken: asyncio.Future[TakenLease]

    def takes(self, held: LeaseInForce) -> bool:
        """Whether this lease is of use to it."""
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
                self._node.give_back(waiting.taken.result().held, (), EndReason.RELEASED)
            self._withdraw(placing, request)
            raise
        self._withdraw(placing, request)
        return waiting.taken.result()

    def stop(self) -> None:
        """Pass nothing on any more."""
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
            await self._node.granted.wait(self._look())

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

    def _pass_on(self, held: LeaseInForce) -> None:
        waiting = next((each for each in self._waiting if each.takes(held)), None)
        if waiting is None:
            return
        workers = self._node.loaded_now(held, waiting.models)
        if workers and self._node.claim(held.id, waiting.session.key, workers.values()):
            log.debug("lease %d is passed on to %s", held.id, waiting.session.key)
            waiting.taken.set_result(TakenLease(held, workers))
