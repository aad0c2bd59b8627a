"""Two simulated hosts with a program on each, for tests of what simulations are made of."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from random import Random
from typing import Any

from common.frame_line import FrameLine, LineBroken
from tests.kit.simulation.simulated_loop import SimulatedProgram, bury
from tests.kit.simulation.simulated_network import Network, NetworkedLoop, listener

_FRAME_BYTES = 1000


class Stage:
    """Two hosts, a program on each, and what they noted with the time of it."""

    def __init__(self) -> None:
        self.loop = NetworkedLoop()
        self.network = self.loop.network = Network(self.loop, Random(1), (0.001, 0.002))
        self.one = self.program("one", 1e6)
        self.other = self.program("other", 5.0)
        self.noted: list[tuple[float, str]] = []

    def program(self, host: str, offset_s: float) -> SimulatedProgram:
        program = SimulatedProgram(self.loop, host, host, offset_s)
        program.at_death.append(partial(self.network.lose, program))
        return program

    def note(self, what: str) -> None:
        self.noted.append((round(self.loop.passed_s, 1), what))

    def texts(self) -> list[str]:
        return [what for _, what in self.noted]

    def play(self, course: Coroutine[Any, Any, None]) -> None:
        """Run the course, after which all programs end."""
        try:
            self.loop.run_until_complete(course)
            assert self.loop.unhandled == []
        finally:
            bury(self.loop, (self.one, self.other))

    async def listen(self) -> None:
        """Note every frame that comes to the other host, and the end of the line."""

        async def pump(line: FrameLine) -> None:
            try:
                await line.pump(lambda frame: self.note(frame.decode()))
            except LineBroken:
                self.note("broken")

        def accept() -> FrameLine:
            line = FrameLine(_FRAME_BYTES)
            self.tasks = [asyncio.get_running_loop().create_task(pump(line))]
            return line

        await self.loop.create_server(accept, sock=listener("other", 1))

    async def send(self) -> None:
        """Send a frame each second."""
        _, line = await self.loop.create_connection(partial(FrameLine, _FRAME_BYTES), "other", 1)
        assert isinstance(line, FrameLine)
        for number in range(5):
            line.send(b"%d" % number)
            await asyncio.sleep(1.0)
        await asyncio.Event().wait()
