"""A function's connection to a GPU manager in a simulation: its session there, and no sockets."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gpu_manager.errors import GpuManagerError
from gpu_manager.sessions.sessions import ClientSession
from hunt.seeds.programs.node_program import NodeProgram, identity_of
from hunt.seeds.scenarios.planned_functions import PlannedFunction
from hunt.seeds.surroundings import Surroundings
from scheduler.model.errors import SchedulerError
from scheduler.model.values import LeaseId
from tests.kit.simulation.simulated_loop import PROGRAM, SimulatedProgram

_Answer = TypeVar("_Answer")


class ManagerLost(Exception):
    """The connection to the GPU manager broke."""


FAILURES = (GpuManagerError, SchedulerError, ManagerLost)


class ManagerLink:
    """One connection of a function's process to a GPU manager, and its session there."""

    def __init__(
        self,
        around: Surroundings,
        function: PlannedFunction,
        node: NodeProgram,
        program: SimulatedProgram,
    ) -> None:
        self.broken = False
        self._function = function
        self._around = around
        self._node = node
        self._program = program  # the manager's
        self._own = _running_program()
        # Dictionaries, as a set's order follows addresses: what ends together ends in one order.
        self._serving: dict[asyncio.Task[None], None] = {}
        self._session: ClientSession | None = None
        self._waiting: dict[asyncio.Future[Any], None] = {}
        program.at_death.append(self._lost)

    async def ask(self, work: Callable[[ClientSession], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Have the manager do this for the session."""
        network, own, there = self._around.network, self._own.host, self._node.name
        await network.travel(own, there)
        if self.broken or not self._node.serves:
            raise ManagerLost
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = None
        task = self._program.start(self._serve(work, answer), f"{self._node.name} serves")
        self._serving[task] = None
        task.add_done_callback(self._serving.pop)
        try:
            found = await answer
        except asyncio.CancelledError:
            self._cancel(task)
            raise
        finally:
            del self._waiting[answer]
        await network.travel(there, own)
        return found

    def lease_ended(self, lease: LeaseId) -> None:
        """The shim would forget the lease; here every call asks for one."""

    def end(self) -> None:
        """The function's process has ended: its kernel closes the connection."""
        self.broken = True
        if self._program.alive:
            loop, context = self._around.loop, self._program.context
            loop.call_soon(self._leave, context=context)

    async def _serve(
        self,
        work: Callable[[ClientSession], Coroutine[Any, Any, _Answer]],
        answer: asyncio.Future[_Answer],
    ) -> None:
        if self._session is None:
            identity = identity_of(self._function)
            self._session = self._node.sessions.join(identity, self._own.name, self.lease_ended)
        try:
            found = await work(self._session)
        except (GpuManagerError, SchedulerError) as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(found)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if self._program.alive:
            self._around.loop.call_soon(task.cancel, context=self._program.context)

    def _leave(self) -> None:
        for task in list(self._serving):
            task.cancel()
        session, self._session = self._session, None
        if session is not None:
            self._node.sessions.leave(session, self.lease_ended)

    def _lost(self) -> None:
        self.broken = True
        for answer in list(self._waiting):
            if not answer.done():
                answer.set_exception(ManagerLost())


def _running_program() -> SimulatedProgram:
    program = PROGRAM.get()
    assert program is not None, "a program asks"
    return program
