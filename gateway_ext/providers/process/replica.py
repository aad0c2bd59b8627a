"""One replica: an instance that is replaced when it ends, more slowly the more often it does."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from gateway_ext.providers.process.instance import Instance
from gateway_ext.providers.process.logs import FunctionLog
from gateway_ext.providers.process.settings import ProcessSettings

log = logging.getLogger(__name__)

_LIVED_LONG_S = 60.0


class Watch(NamedTuple):
    """How a replica comes to instances, and whom it tells that something has changed."""

    make: Callable[[], Instance]
    changed: Callable[[], None]
    log: FunctionLog
    settings: ProcessSettings


class Replica:
    """Keeps one instance alive until it is stopped."""

    def __init__(self, watch: Watch) -> None:
        self.instance: Instance | None = None
        self.trouble = ""
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
            await self.instance.stop(self._watch.settings.stop_s)
        await asyncio.wait([self._task])

    async def _keep(self) -> None:
        pause_s = self._watch.settings.first_pause_s
        loop = asyncio.get_running_loop()
        while not self._leaving.is_set():
            started_s = loop.time()
            why = await self._live()
            if self._leaving.is_set():
                return
            if loop.time() - started_s > _LIVED_LONG_S:
                pause_s, self._deaths = self._watch.settings.first_pause_s, 0
            self._note(why, pause_s)
            self._watch.changed()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._watch.settings.longest_pause_s)

    async def _live(self) -> str:
        """One instance's life; why it ended."""
        try:
            instance = self._watch.make()
        except OSError as error:
            return f"cannot be started: {error}"
        self.instance = instance
        output = asyncio.create_task(instance.collect())
        try:
            within_s = self._watch.settings.start_timeout_s
            if await instance.until_ready(within_s):
                self.trouble = ""
                self._watch.changed()
            else:
                instance.kill(f"was not ready within {within_s:g} s")
            why = await asyncio.shield(instance.exited)
            self._watch.changed()  # no call goes there any more, whatever is left to clean up
        except asyncio.CancelledError:
            instance.kill("was stopped")
            await instance.exited
            raise
        finally:
            await output
            self._last_words = self._watch.log.last_words(instance.name)
            self.instance = None
        return why

    def _note(self, why: str, pause_s: float) -> None:
        self._deaths += 1
        times = "" if self._deaths == 1 else f", {self._deaths} times"
        last = self._last_words
        self.trouble = f"{why}{times}" + (f"; last words: {last[:300]}" if last else "")
        log.warning("an instance %s; the next one follows in %g s", self.trouble, pause_s)


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a replica is kept alive no longer", exc_info=error)
