"""One instance: a container that serves one function, until it ends."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Endpoint, LogLine
from gateway_ext.providers.docker.engine import (
    EngineAway,
    EngineClient,
    EngineRefused,
    OutputFrames,
    OutputLine,
)
from gateway_ext.providers.managed.instance import answers, wait_until_ready
from gateway_ext.providers.managed.logs import MAX_LINE_BYTES, FunctionLog, LimitedOutput

log = logging.getLogger(__name__)

_DRAIN_OUTPUT_S = 2.0
_ENDED_S = 10.0
_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_GONE = 404


class ContainerInstance:
    """A container from its start to its removal; `removed` is called with its name at the end."""

    def __init__(
        self,
        name: str,
        engine: EngineClient,
        log: FunctionLog,
        removed: Callable[[str], None],
        *,
        port: int,
        has_our_runtime: bool,
    ) -> None:
        self.name = name
        self.ready = False
        self.started = False
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._log = log
        self._removed = removed
        self._port = port
        self._has_our_runtime = has_our_runtime
        self._address = ""
        self._why = ""
        self._newest_at: datetime | None = None  # of the lines that were read
        self._limited = LimitedOutput[OutputLine](self._store, self._write)
        self._killing: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> Endpoint:
        address = f"tcp:{self._address}:{self._port}"
        return Endpoint(self.name, address, exited=self.exited)

    async def adopt_output(self) -> None:
        """Continue after the newest line that an earlier gateway stored."""
        self._newest_at = await asyncio.to_thread(self._log.last_at, self.name)

    def set_started(self, address: str) -> None:
        self.started = True
        self._address = address

    def set_ended(self, why: str) -> None:
        self.ready = False
        if not self.exited.done():
            self.exited.set_result(self._why or why)

    async def collect_output(self) -> None:
        """Store its output until it has ended; then remove the container."""
        following = asyncio.create_task(self._follow_output())
        try:
            await asyncio.shield(self.exited)
            await asyncio.wait([following], timeout=_DRAIN_OUTPUT_S)
        except asyncio.CancelledError:
            self._removed(self.name)  # detached: the next gateway adopts the container
            raise
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            self._limited.close()
        await self.remove()

    async def remove(self) -> None:
        """Have the Engine remove its container; the fleet does so later if that fails."""
        try:
            await self._engine.remove(self.name)
        except ProviderFailed as error:
            log.warning("container %s is removed later: %s", self.name, error)
        finally:
            self._removed(self.name)

    async def until_ready(self, within_s: float) -> bool:
        self.ready = await wait_until_ready(self._is_ready, self.exited, within_s)
        return self.ready

    async def stop(self, within_s: float) -> None:
        """Ask it to end; the Engine kills it after `within_s`.

        If the Engine cannot be reached, the instance counts as ended; its container is removed
        when the Engine is back.
        """
        self.ready = False
        if self.exited.done():
            return
        try:
            await self._engine.stop(self.name, within_s)
        except EngineAway as error:
            self.set_ended(str(error))
        except EngineRefused as refused:
            self.set_ended(refused.message)
        await self._wait_for_end()

    def kill(self, why: str) -> None:
        if self.exited.done() or self._why:
            return
        self._why = why
        self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        try:
            await self._engine.kill(self.name)
            await self._wait_for_end()
        except ProviderFailed as error:
            self.set_ended(str(error))
        finally:
            self.set_ended("was ended")

    async def _wait_for_end(self) -> None:
        """Wait for the Engine's event; without one the container counts as ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.exited), _ENDED_S)
        self.set_ended("was ended")

    async def _follow_output(self) -> None:
        """Read the output, and read on from the newest line whenever the stream breaks."""
        pause_s = _RETRY_S
        while True:
            try:
                await self._read_output()
                pause_s = _RETRY_S
            except EngineAway:
                pause_s = _RETRY_S
            except ProviderFailed as error:
                if isinstance(error, EngineRefused) and error.status == _GONE:
                    return
                if pause_s == _RETRY_S:  # the first failure of several
                    self._write(f"its output cannot be read: {error}")
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
            if self.exited.done():
                return
            await asyncio.wait([self.exited], timeout=pause_s)

    async def _read_output(self) -> None:
        frames, after = OutputFrames(MAX_LINE_BYTES), self._newest_at
        async with contextlib.aclosing(self._engine.output(self.name, after)) as output:
            async for data in output:
                pause_s = self._take(frames.feed(data), len(data), after)
                if pause_s:
                    await asyncio.sleep(pause_s)
        self._take(frames.end(), 0, after)

    def _take(self, lines: list[OutputLine], byte_count: int, after: datetime | None) -> float:
        """Store lines newer than `after`: a stream that is opened again repeats older ones."""
        new = [line for line in lines if after is None or line.at > after]
        if new:  # output and errors are not in order with each other
            newest = max(line.at for line in new)
            self._newest_at = newest if self._newest_at is None else max(newest, self._newest_at)
        return self._limited.add(new, byte_count)

    def _store(self, lines: Sequence[OutputLine]) -> None:
        function = self._log.function
        self._log.add([LogLine(function, self.name, line.at, line.text) for line in lines])

    def _write(self, text: str) -> None:
        self._log.write(self.name, text)

    async def _is_ready(self) -> bool:
        connecting = asyncio.open_connection(self._address, self._port)
        return await answers(connecting, b"ready" if self._has_our_runtime else b"")
