"""One replica of a function: an instance, and the next one when that ends, after growing pauses.

The pauses between instances that were ready stay short, as a stranger's call can end one.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.foreign_text import plain
from common.tasks import error_of
from common.telemetry.stranger_log import StrangerLog
from common.time_limits import time_limit
from gateway_ext.errors import GatewayError
from gateway_ext.model import Deployment, Endpoint, SlowStart
from gateway_ext.providers.managed.logs import FunctionLog

log = logging.getLogger(__name__)

_LIVED_LONG_S = 60.0
_SLOW_S = 10.0  # of a start: then its function's log says so
_MANY_DEATHS = 3
_MOST_AFTER_CALLS_S = 5.0  # between instances that were ready: one call may have ended the latest
# As our runtime begins its last line then: the reason of the end, and not what came before it.
_IMPORT_FAILED = "its handler cannot be imported: "


_EXITED = "exited with status "


def exited_with(status: object) -> str:
    """The reason of an end that the program itself chose."""
    return f"{_EXITED}{status}"


def chose_its_end(why: str) -> bool:
    """Whether an instance that ended for this reason was neither killed nor stopped by others."""
    return why.startswith(_EXITED)


@dataclass(eq=False)
class ManagedInstance(ABC):
    """One container or process that serves a function, from its start to its end."""

    name: str  # in log lines and endpoints

    def __post_init__(self) -> None:
        self.ready = False
        self._why = ""  # it was killed
        # Resolves to the reason of its end.
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint: ...

    @abstractmethod
    async def collect_output(self) -> None:
        """Store its output until it has ended and nothing is left of it."""

    @abstractmethod
    async def stop(self, within_s: float) -> None:
        """Ask it to end; kill it after `within_s`."""

    @abstractmethod
    def kill(self, why: str) -> None:
        """Kill it at once; `why` is the reason that `exited` resolves to."""

    @abstractmethod
    async def _is_ready(self) -> bool:
        """Whether it can be called now."""

    async def until_ready(self, within_s: float) -> bool:
        """True once it can be called; False if it ends first or `within_s` passes."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while not self.exited.done() and loop.time() < started_s + within_s:
            if await self._is_ready():
                self.ready = not self.exited.done()
                return self.ready
            await asyncio.sleep(_OFTEN_S if loop.time() < started_s + _FIRST_S else _LATER_S)
        return False

    def set_ended(self, why: str) -> None:
        """It has ended, for this reason unless it was killed for another."""
        self.ready = False
        if not self.exited.done():
            self.exited.set_result(self._why or why)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedSettings:
    """Bounds on the life of an instance and on the log of a function.

    `start_timeout_s` bounds the time until an instance is ready, `drain_s` the time that calls in
    flight get before it is stopped, `stop_s` the time between asking it to end and killing it.
    An instance that has died after a long life is replaced at once, another one after
    `first_pause_s`, which doubles up to `longest_pause_s`.
    """

    log_bytes: int = 2 << 20
    start_timeout_s: float = 600.0
    drain_s: float = 30.0
    stop_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0


_ANSWER_S = 5.0
_REQUEST = b"GET /_/%b HTTP/1.1\r\nHost: function\r\nConnection: close\r\n\r\n"
# An instance is asked often at first: most take calls within a second or two.
_FIRST_S, _OFTEN_S, _LATER_S = 2.0, 0.02, 0.2

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answers(connecting: Awaitable[Connection], route: bytes) -> bool:
    """Whether our runtime answers well at `route`, `ready` or `health`.

    Without a route an open port is enough, as of an image that is not ours.
    """
    try:
        async with time_limit(_ANSWER_S):
            reader, writer = await connecting
            try:
                if not route:
                    return True
                writer.write(_REQUEST % route)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # ValueError: the line exceeds the reader's limit
        return False


I = TypeVar("I", bound=ManagedInstance)  # noqa: E741 - an instance


class Replica(Generic[I]):
    """Keeps one instance alive until it is stopped; `running` is an instance to begin with."""

    def __init__(self, version: "ReplicaSet[I]", running: I | None = None) -> None:
        self.instance: I | None = running
        self.trouble = ""
        self.broken = ""  # why no instance need be waited for; empty while one may become ready
        self.slow: SlowStart | None = None
        self._running = running
        self._detached = False
        self._version = version
        self._deaths = 0
        self._was_ready = False  # the instance, whatever became of it
        self._failed_starts = 0
        self._name = self._start_name = f"{version.log.function.name}-start"
        self._last_line = ""
        self._output: list[str] = []  # of the start that failed last
        self._repeats = False  # the start that failed last, what the one before it wrote
        self._told_slow = False
        self._timer: asyncio.TimerHandle  # of a start that is slow, then of a life that is long
        self._leaving = asyncio.Event()
        self._task = asyncio.create_task(self._keep_alive())
        self._task.add_done_callback(_log_failure)

    @property
    def ready(self) -> bool:
        return self.instance is not None and self.instance.ready and not self._leaving.is_set()

    @property
    def dying(self) -> str:
        """How its instances end, again and again, after they were ready; empty if they do not."""
        return self.trouble if self._deaths >= _MANY_DEATHS and not self.broken else ""

    def leave(self) -> None:
        """Stop offering its endpoint, and start no further instance."""
        self._leaving.set()
        if self.instance is None:
            self._task.cancel()

    async def stop(self) -> None:
        """End its instance, which gets `stop_s` to finish calls in flight."""
        self.leave()
        if self.instance is not None:
            await self.instance.stop(self._version.settings.stop_s)
        await asyncio.wait([self._task])

    async def detach(self) -> None:
        """Stop watching its instance, which continues to run."""
        self._detached = True
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep_alive(self) -> None:
        settings = self._version.settings
        pause_s = settings.first_pause_s
        loop = asyncio.get_running_loop()
        while self._running is not None or not self._leaving.is_set():
            started_s = loop.time()
            why = await self._run_instance()
            if self._leaving.is_set():
                return
            if loop.time() - started_s > _LIVED_LONG_S:
                pause_s = 0.0
            if self._was_ready:
                pause_s = min(pause_s, _MOST_AFTER_CALLS_S)
            self._note_death(why, pause_s)
            self._version.changed()
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, settings.first_pause_s), settings.longest_pause_s)

    async def _run_instance(self) -> str:
        """Run one instance to its end; returns the reason of the end."""
        self._was_ready = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SLOW_S, self._note_slow, loop.time())
        try:
            try:
                instance, self._running = self._running, None
                if instance is None:
                    instance = await self._version.make()
            except (GatewayError, OSError) as error:
                self._name, self._last_line, self._repeats = self._start_name, "", False
                return f"cannot be started: {error}"
            return await self._run_started(instance)
        finally:
            self._timer.cancel()
            self.slow = None

    async def _run_started(self, instance: I) -> str:
        self.instance, self._name = instance, instance.name
        self._version.log.begin_start(instance.name, self._output)
        output = asyncio.create_task(instance.collect_output())
        try:
            within_s = self._version.settings.start_timeout_s
            if await instance.until_ready(within_s):
                self._note_ready(instance)
            else:
                instance.kill(f"was not ready within {within_s:g} s")
            why = await asyncio.shield(instance.exited)
            self._version.changed()  # before the clean-up: no call may go there any more
        except asyncio.CancelledError:
            if self._detached:
                output.cancel()
            else:
                instance.kill("was stopped")
                await instance.exited
            raise
        finally:
            try:
                await self._collected(instance, output)
            finally:
                self.instance = None
        return why

    async def _collected(self, instance: I, output: asyncio.Task[None]) -> None:
        """Wait for the rest of its output; without it the next instance starts all the same."""
        try:
            try:
                await output
            finally:
                start = self._version.log.end_start(instance.name)
                self._repeats = start is not None and start.repeats
                if start is not None:
                    self._output = start.texts
            if not self._repeats:  # in a thread: the log may be full of another instance's lines
                last_line = self._version.log.last_line
                self._last_line = await asyncio.to_thread(last_line, instance.name)
        except OSError as error:  # such as too many open files
            log.warning("what %s left was not cleaned up: %s", instance.name, error)

    def _note_ready(self, instance: I) -> None:
        self.broken, self.slow = "", None
        if self._deaths < _MANY_DEATHS:
            self.trouble = ""
        self._was_ready, self._failed_starts, self._output = True, 0, []
        self._told_slow = False
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_LIVED_LONG_S, self._forget_deaths)
        self._version.log.end_start(instance.name)
        self._version.changed()

    def _forget_deaths(self) -> None:
        """The instance has lived long."""
        self._deaths, self.trouble = 0, ""
        self._version.changed()

    def _note_slow(self, began_s: float) -> None:
        self.slow = SlowStart(self._version.starting, began_s)
        if not self._told_slow:
            self._told_slow = True
            text = f"{self._version.starting} after {_SLOW_S:g} s"
            self._version.log.write(self._start_name, text)
            self.trouble = self.trouble or text
        self._version.changed()

    def _note_death(self, why: str, pause_s: float) -> None:
        self._deaths += 1
        times = "" if self._deaths == 1 else f" ({self._deaths} times)"
        last = plain(self._last_line[:300])
        words = f"; last words: {last}" if last else ""
        self.trouble = f"{why}{times}{words}"
        if not self._was_ready:
            self._failed_starts += 1
            # Whoever killed one need not kill the next one, too.
            if chose_its_end(why) or self._failed_starts > 1:
                self.broken = last if last.startswith(_IMPORT_FAILED) else f"it {why}{words}"
        told = f"{why}{times}" + (f", in the same way as before{words}" if self._repeats else "")
        follows = f"the next one starts in {pause_s:g} s"
        self._version.log.write(self._name, f"this instance {told}; {follows}")
        function, text = self._version.log.function, "%s: an instance %s; %s"
        self._version.deaths.warn(text, function, self.trouble, follows)


def _log_failure(task: asyncio.Task[None]) -> None:
    if (error := error_of(task)) is not None:
        log.error("a replica is not kept alive any more", exc_info=error)


class ReplicaSet(ABC, Generic[I]):
    """Replicas that run the same; `running` are instances to begin with."""

    starting = "its module is still being imported"  # what a start takes its time for

    def __init__(
        self,
        changed: Callable[[], None],
        output: FunctionLog,
        settings: ManagedSettings,
        running: Iterable[I] = (),
    ) -> None:
        """`changed` is called when readiness changes."""
        self.changed = changed
        self.log = output
        self.settings = settings
        self.deaths = StrangerLog(log)  # strangers cause deaths
        self.replicas = [Replica(self, instance) for instance in running]

    @property
    @abstractmethod
    def deployment(self) -> Deployment: ...

    @abstractmethod
    async def make(self) -> I:
        """Start another instance."""

    def add(self) -> Replica[I]:
        self.replicas.append(Replica(self))
        return self.replicas[-1]

    @property
    def outdated(self) -> list[Replica[I]]:
        """Replicas that serve, and whose instances would serve better if they were started now."""
        return []

    def resize(self, wanted: int) -> list[Replica[I]]:
        """Change the number of replicas; returns the surplus ones, which get no new call."""
        while len(self.replicas) < wanted:
            self.add()
        leaving = sorted(self.replicas, key=lambda replica: replica.ready)
        leaving = leaving[: len(self.replicas) - wanted]
        for replica in leaving:
            self.replicas.remove(replica)
            replica.leave()
        return leaving

    @property
    def endpoints(self) -> list[Endpoint]:
        return [r.instance.endpoint for r in self.replicas if r.ready and r.instance is not None]

    @property
    def instances(self) -> list[I]:
        """Instances that are alive, ready or not."""
        return [r.instance for r in self.replicas if r.instance is not None]

    @property
    def trouble(self) -> str:
        """The problem of one replica; empty if there is none."""
        return next((replica.trouble for replica in self.replicas if replica.trouble), "")

    @property
    def broken(self) -> str:
        """Why none of its replicas starts, or need be waited for; empty while one may serve."""
        reasons = [replica.broken for replica in self.replicas]
        return reasons[0] if reasons and all(reasons) else ""
