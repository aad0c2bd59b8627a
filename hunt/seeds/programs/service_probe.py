"""When service is back: when calls that begin after the last fault are answered everywhere."""

import asyncio

from common.time_limits import time_limit
from hunt.seeds.programs.callers import CallersProgram
from hunt.seeds.surroundings import Surroundings

_EVERY_S = 0.5
_SELDOM = 10  # later on, after pauses of a tenth of the time that has passed
_GOOD = 200


class ServiceProbe:
    """Calls every function through every gateway, again and again, until each has answered.

    A call that waits holds up no later one: what a user who comes now finds is what counts.
    """

    def __init__(self, around: Surroundings, callers: CallersProgram) -> None:
        self.back_s: float | None = None
        self.last = ""  # what came back last
        self._around = around
        self._callers = callers
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Return when all have answered; `back_s` is how long after the beginning."""
        scenario, loop = self._around.scenario, self._around.loop
        began_s = loop.passed_s
        async with asyncio.TaskGroup() as tasks:
            for number in range(scenario.gateways):
                for function in scenario.functions:
                    tasks.create_task(self._served(f"g{number}", f"function/{function.path}"))
        self.back_s = loop.passed_s - began_s

    async def _served(self, gateway: str, path: str) -> None:
        answered, loop = asyncio.Event(), self._around.loop
        began_s = loop.passed_s
        while True:
            task = asyncio.create_task(self._call(gateway, path, answered))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                pause_s = max(_EVERY_S, (loop.passed_s - began_s) / _SELDOM)
                async with time_limit(pause_s):
                    await answered.wait()
            except TimeoutError:
                continue
            self.last = f"{path} at {gateway}"
            return

    async def _call(self, gateway: str, path: str, answered: asyncio.Event) -> None:
        record = await self._callers.call(gateway, path)
        if record.status == _GOOD:
            answered.set()
