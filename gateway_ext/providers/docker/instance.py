"""One instance: a container that serves one function, until it ends."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Endpoint, FunctionId, LogLine
from gateway_ext.providers.docker.engine import Engine
from gateway_ext.providers.docker.frames import Frames, Line
from gateway_ext.providers.docker.transport import EngineAway, EngineRefused
from gateway_ext.providers.function_log import (
    BYTES_PER_S,
    LINES_PER_S,
    MAX_LINE_BYTES,
    SHORTEST_PAUSE_S,
    FunctionLog,
)

log = logging.getLogger(__name__)

_ASK_S, _LATER_ASK_S, _SOON_S = 0.05, 0.2, 5.0
_ANSWER_S = 5.0
_DRAIN_OUTPUT_S = 2.0
_ENDED_S = 10.0
_AGAIN_S, _LONGEST_AGAIN_S = 0.5, 10.0
_GONE = 404
_READY = b"GET /_/ready HTTP/1.1\r\nHost: function\r\nConnection: close\r\n\r\n"


class Place(NamedTuple):
    """Whose instance it is, where its lines go, and how it is asked whether it is ready."""

    function: FunctionId
    log: FunctionLog
    port: int
    ours: bool


class Instance:
    """A container from its start to its end; `gone` is told when nothing is left of it."""

    def __init__(
        self, name: str, engine: Engine, place: Place, gone: Callable[[str], None]
    ) -> None:
        self.name = name
        self.ready = False
        self.started = False
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._place = place
        self._gone = gone
        self._address = ""
        self._why = ""
        self._last_at: datetime | None = None  # of the newest line that is kept
        self._killing: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Where it is called."""
        return Endpoint(self.name, f"tcp:{self._address}:{self._place.port}")

    async def goes_on(self) -> None:
        """It has run under another gateway, which has kept some of its lines."""
        self._last_at = await asyncio.to_thread(self._place.log.last_at, self.name)

    def runs_at(self, address: str) -> None:
        """It has been started, and has this address in its network."""
        self.started = True
        self._address = address

    def ended(self, why: str) -> None:
        """The container does not run any more."""
        self.ready = False
        if not self.exited.done():
            self.exited.set_result(self._why or why)

    async def collect(self) -> None:
        """Keeps what it writes; until it has ended and is removed."""
        following = asyncio.create_task(self._follow())
        try:
            await asyncio.shield(self.exited)
            await asyncio.wait([following], timeout=_DRAIN_OUTPUT_S)
        except asyncio.CancelledError:
            self._gone(self.name)  # left to itself: whoever comes next finds it
            raise
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        await self._remove()

    async def until_ready(self, within_s: float) -> bool:
        """Whether it says that it is ready, in this time and before it ends."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while not self.exited.done() and loop.time() < started_s + within_s:
            if await self._is_ready():
                self.ready = not self.exited.done()
                return self.ready
            await asyncio.sleep(_ASK_S if loop.time() < started_s + _SOON_S else _LATER_ASK_S)
        return False

    async def stop(self, within_s: float) -> None:
        """Asks it to end, and makes it. Without an Engine it is forgotten: it goes later."""
        self.ready = False
        if self.exited.done():
            return
        try:
            await self._engine.stop(self.name, within_s)
        except EngineAway as error:
            self.ended(str(error))
        except EngineRefused as refused:
            self.ended(refused.message)
        await self._until_told()

    def kill(self, why: str) -> None:
        """At once."""
        if self.exited.done() or self._why:
            return
        self._why = why
        self._note(why)
        self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        try:
            await self._engine.kill(self.name)
            await self._until_told()
        except ProviderFailed as error:
            self.ended(str(error))
        finally:
            self.ended("was ended")

    async def _until_told(self) -> None:
        """The Engine says so at once; should that word be lost, it is taken as given."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.exited), _ENDED_S)
        self.ended("was ended")

    async def _remove(self) -> None:
        try:
            await self._engine.remove(self.name)
        except ProviderFailed as error:
            log.warning("container %s is removed later: %s", self.name, error)
        finally:
            self._gone(self.name)

    async def _follow(self) -> None:
        """Goes on from where it was when the Engine was away."""
        pause_s = _AGAIN_S
        while True:
            try:
                await self._lines()
                pause_s = _AGAIN_S
            except EngineAway:
                pause_s = _AGAIN_S
            except ProviderFailed as error:
                if isinstance(error, EngineRefused) and error.status == _GONE:
                    return
                if pause_s == _AGAIN_S:  # once, and not each time that it is tried
                    self._note(f"its output cannot be read: {error}")
                pause_s = min(2 * pause_s, _LONGEST_AGAIN_S)
            if self.exited.done():
                return
            await asyncio.wait([self.exited], timeout=pause_s)

    async def _lines(self) -> None:
        frames, after = Frames(MAX_LINE_BYTES), self._last_at
        async with contextlib.aclosing(self._engine.output(self.name, after)) as output:
            async for data in output:
                lines = frames.feed(data)
                self._keep(lines, after)
                pause_s = max(len(lines) / LINES_PER_S, len(data) / BYTES_PER_S)
                if pause_s > SHORTEST_PAUSE_S:
                    await asyncio.sleep(pause_s)
        self._keep(frames.end(), after)

    def _keep(self, lines: list[Line], after: datetime | None) -> None:
        """Without those that were kept before the stream broke: it begins with them again."""
        new = [line for line in lines if after is None or line.at > after]
        if not new:
            return
        newest = max(line.at for line in new)  # the two streams are not in order with each other
        self._last_at = newest if self._last_at is None else max(newest, self._last_at)
        place = self._place
        kept = [LogLine(place.function, self.name, line.at, line.text) for line in new]
        with contextlib.suppress(ValueError):  # the log was closed: the function is gone
            place.log.add(kept)

    def _note(self, text: str) -> None:
        with contextlib.suppress(ValueError):
            self._place.log.write(self.name, text)

    async def _is_ready(self) -> bool:
        """Our runtime says so itself; of another image an open port is enough."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                where = (self._address, self._place.port)
                reader, writer = await asyncio.open_connection(*where)
                try:
                    if not self._place.ours:
                        return True
                    writer.write(_READY)
                    return b" 200 " in await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError):  # the last: a line that does not end
            return False
