"""One replica: an instance that is replaced when it ends, more slowly the more often it does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from gateway_ext.errors import GatewayError
from gateway_ext.model import Endpoint
from gateway_ext.providers.function_log import FunctionLog

log = logging.getLogger(__name__)

_LIVED_LONG_S = 60.0


class Instance(Protocol):
    """What runs a function from its start to its end."""

    ready: bool
    exited: asyncio.Future[str]  # why it ended

    @property
    def name(self) -> str:
        """What log lines and people call it."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """Where it is called."""
        ...

    async def collect(self) -> None:
        """Keep what it writes, until it has ended and nothing is left of it."""
        ...

    async def until_ready(self, within_s: float) -> bool:
        """Whether it can be called, in this time and before it ends."""
        ...

    async def stop(self, within_s: float) -> None:
        """Ask it to end, and make it."""
        ...

    def kill(self, why: str) -> None:
        """At once."""
        ...


class Pace(Protocol):
    """How patient one is with instances."""

    @property
    def start_timeout_s(self) -> float:
        """Until an instance is ready."""
        ...

    @property
    def stop_s(self) -> float:
        """Until one that was asked to end has ended."""
        ...

    @property
    def first_pause_s(self) -> float:
        """Before the next one after a death; it doubles ..."""
        ...

    @property
    def longest_pause_s(self) -> float:
        """... up to this."""
        ...


I = TypeVar("I", bound=Instance)  # noqa: E741 - an instance


class Watch(NamedTuple, Generic[I]):
    """How a replica comes to instances, and whom it tells that something has changed."""

    make: Callable[[], Awaitable[I]]
    changed: Callable[[], None]
    log: FunctionLog
    pace: Pace


class Replica(Generic[I]):
    """Keeps one instance alive until it is stopped; the first one may run already."""

    def __init__(self, watch: Watch[I], running: I | None = None) -> None:
        self.instance: I | None = running
        self.trouble = ""
        self._running = running
        self._let_go = False
        self._watch = watch
        self._deaths = 0
        self._last_words = ""
        self._leaving = asyncio.Event()
        self._task = asyncio.create_task(self._keep())
        self._task.add_done_callback(_say_failure)

    @property
    def ready(self) -> bool:
        """Whether it can be called now."""
        return self.instance is not None and self.instance.ready and not self._leaving.is_set()

    def leave(self) -> None:
        """It gets no new call, and no new instance."""
        self._leaving.set()
        if self.instance is None:
            self._task.cancel()

    async def stop(self) -> None:
        """End its instance; calls in flight may finish in the time that instances have."""
        self.leave()
        if self.instance is not None:
            await self.instance.stop(self._watch.pace.stop_s)
        await asyncio.wait([self._task])

    async def let_go(self) -> None:
        """Keep it no longer: its instance goes on by itself."""
        self._let_go = True
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep(self) -> None:
        pause_s = self._watch.pace.first_pause_s
        loop = asyncio.get_running_loop()
        while self._running is not None or not self._leaving.is_set():
            started_s = loop.time()
            why = await self._live()
            if self._leaving.is_set():
                return
            if loop.time() - started_s > _LIVED_LONG_S:
                pause_s, self._deaths = self._watch.pace.first_pause_s, 0
            self._note(why, pause_s)
            self._watch.changed()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._watch.pace.longest_pause_s)

    async def _live(self) -> str:
        """One instance's life; why it ended."""
        try:
            instance = await self._next()
        except (GatewayError, OSError) as error:
            return f"cannot be started: {error}"
        self.instance = instance
        output = asyncio.create_task(instance.collect())
        try:
            within_s = self._watch.pace.start_timeout_s
            if await instance.until_ready(within_s):
                self.trouble = ""
                self._watch.changed()
            else:
                instance.kill(f"was not ready within {within_s:g} s")
            why = await asyncio.shield(instance.exited)
            self._watch.changed()  # no call goes there any more, whatever is left to clean up
        except asyncio.CancelledError:
            if self._let_go:
                output.cancel()
            else:
                instance.kill("was stopped")
                await instance.exited
            raise
        finally:
            await output
            self._last_words = self._watch.log.last_words(instance.name)
            self.instance = None
        return why

    async def _next(self) -> I:
        if self._running is None:
            return await self._watch.make()
        found, self._running = self._running, None
        return found

    def _note(self, why: str, pause_s: float) -> None:
        self._deaths += 1
        times = "" if self._deaths == 1 else f", {self._deaths} times"
        last = self._last_words
        self.trouble = f"{why}{times}" + (f"; last words: {last[:300]}" if last else "")
        log.warning("an instance %s; the next one follows in %g s", self.trouble, pause_s)


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a replica is kept alive no longer", exc_info=error)
