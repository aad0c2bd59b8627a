"""Containers of this gateway: each one's life, and all of them across failures of the Engine."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from secrets import token_hex

from gateway_ext.errors import GatewayError, ProviderFailed
from gateway_ext.model import Endpoint, LogLine
from gateway_ext.providers.docker.container_spec import Release, network
from gateway_ext.providers.docker.engine import (
    ContainerState,
    EngineClient,
    ListedContainer,
    OutputFrames,
    OutputLine,
    ended_with,
)
from gateway_ext.providers.http_api import ServerAway, ServerRefused
from gateway_ext.providers.managed.logs import MAX_LINE_BYTES, FunctionLog, LimitedOutput
from gateway_ext.providers.managed.replicas import ManagedInstance, answers
from gateway_ext.settings import GatewaySettings

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0
_COMPARE_EVERY_S = 15.0
_DRAIN_OUTPUT_S = 2.0
_ENDED_S = 10.0
_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_GONE = 404
Reconcile = Callable[[Sequence[ListedContainer]], Awaitable[None]]


@dataclass(eq=False)
class ContainerInstance(ManagedInstance):
    """A container from its start to its removal; `removed` is called with its name at the end."""

    engine: EngineClient
    log: FunctionLog
    removed: Callable[[str], None]
    port: int
    has_our_runtime: bool
    started: bool = field(default=False, init=False)
    _address: str = field(default="", init=False)
    _newest_at: datetime | None = field(default=None, init=False)  # of the lines that were read
    _killing: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._limited = LimitedOutput[OutputLine](self._store, self._write)

    @property
    def endpoint(self) -> Endpoint:
        address = f"tcp:{self._address}:{self.port}"
        return Endpoint(self.name, address, exited=self.exited)

    async def adopt_output(self) -> None:
        """Continue after the newest line that an earlier gateway stored."""
        self._newest_at = await asyncio.to_thread(self.log.last_at, self.name)

    def set_started(self, address: str) -> None:
        self.started = True
        self._address = address

    async def collect_output(self) -> None:
        """Store its output until it has ended; then remove the container."""
        following = asyncio.create_task(self._follow_output())
        try:
            await asyncio.shield(self.exited)
            await asyncio.wait([following], timeout=_DRAIN_OUTPUT_S)
        except asyncio.CancelledError:
            self.removed(self.name)  # detached: the next gateway adopts the container
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
            await self.engine.remove(self.name)
        except ProviderFailed as error:
            log.warning("container %s is removed later: %s", self.name, error)
        finally:
            self.removed(self.name)

    async def stop(self, within_s: float) -> None:
        """Ask it to end; the Engine kills it after `within_s`.

        If the Engine cannot be reached, the instance counts as ended; its container is removed
        when the Engine is back.
        """
        self.ready = False
        if self.exited.done():
            return
        try:
            await self.engine.stop(self.name, within_s)
        except ServerAway as error:
            self.set_ended(str(error))
        except ServerRefused as refused:
            self.set_ended(refused.message)
        await self._wait_for_end()

    def kill(self, why: str) -> None:
        if self.exited.done() or self._why:
            return
        self._why = why
        self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        try:
            await self.engine.kill(self.name)
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
            except ServerAway:
                pause_s = _RETRY_S
            except ProviderFailed as error:
                if isinstance(error, ServerRefused) and error.status == _GONE:
                    return
                if pause_s == _RETRY_S:  # the first failure of several
                    self._write(f"its output cannot be read: {error}")
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
            if self.exited.done():
                return
            await asyncio.wait([self.exited], timeout=pause_s)

    async def _read_output(self) -> None:
        frames, after = OutputFrames(MAX_LINE_BYTES), self._newest_at
        async with contextlib.aclosing(self.engine.output(self.name, after)) as output:
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
        function = self.log.function
        self.log.add([LogLine(function, self.name, line.at, line.text) for line in lines])

    def _write(self, text: str) -> None:
        self.log.write(self.name, text)

    async def _is_ready(self) -> bool:
        connecting = asyncio.open_connection(self._address, self.port)
        return await answers(connecting, b"ready" if self.has_our_runtime else b"")


class ContainerFleet:
    """Instances by name, from before the creation of their container to its removal."""

    def __init__(self, engine: EngineClient, settings: GatewaySettings, port: int) -> None:
        self._engine = engine
        self._name = settings.docker_name
        self._network = settings.docker_network
        self._port = port
        self._instances: dict[str, ContainerInstance] = {}
        self._compared = asyncio.Event()
        self._making_network = asyncio.Lock()

    async def start(
        self, body: Mapping[str, object], release: Release, log: FunctionLog
    ) -> ContainerInstance:
        """Create and start a container; it is removed again if that fails."""
        name = f"{self._name}-{log.function.name[:40]}-{token_hex(4)}"
        instance = self._new_instance(name, release, log)
        try:
            await self.make_network()
            await self._engine.create(name, body)
            await self._engine.start(name)
            await self._set_started(instance)
        except BaseException:
            await asyncio.shield(instance.remove())
            raise
        return instance

    async def adopt(
        self, name: str, release: Release, log: FunctionLog
    ) -> ContainerInstance | None:
        """Watch a container that runs already; None if it has ended meanwhile."""
        instance = self._new_instance(name, release, log)
        try:
            await instance.adopt_output()
            await self._set_started(instance)
        except BaseException:
            self.forget(name)
            raise
        if instance.exited.done():
            self.forget(name)
            return None
        return instance

    async def make_network(self) -> None:
        """Create the network of functions unless one of its name exists."""
        name = self._network
        async with (
            self._making_network
        ):  # concurrent requests would create two networks of one name
            if not await self._engine.has_network(name):
                await self._engine.make_network(network(name, self._engine.labels))

    async def remove_network(self) -> None:
        """Remove the network of functions, if this gateway made it and it is empty."""
        try:
            await self._engine.remove_network(self._network)
        except ProviderFailed as error:
            log.warning("the network %s is still there: %s", self._network, error)

    async def watch(self, reconcile: Reconcile) -> None:
        """Follow the Engine's events, and compare its containers with the instances regularly.

        `reconcile` is given the containers that no instance here stands for.
        """
        try:
            await self._watch(reconcile)
        finally:
            self._compared.set()  # releases those who wait for the first comparison

    def has(self, name: str) -> bool:
        return name in self._instances

    def forget(self, name: str) -> None:
        self._instances.pop(name, None)

    async def first_comparison(self) -> None:
        """Wait until the Engine was asked once, whether it answered or not."""
        await self._compared.wait()

    def _new_instance(self, name: str, release: Release, log: FunctionLog) -> ContainerInstance:
        self._instances[name] = ContainerInstance(
            *(name, self._engine, log, self.forget),
            port=self._port,
            has_our_runtime=release.has_our_runtime,
        )
        return self._instances[name]

    async def _watch(self, reconcile: Reconcile) -> None:
        pause_s = _FIRST_PAUSE_S
        away = False
        while True:
            try:
                async with self._events() as events:
                    await self._compare(reconcile)
                    if away:
                        log.info("the Docker Engine at %s answers again", self._engine.url)
                    away, pause_s = False, _FIRST_PAUSE_S
                    self._compared.set()
                    while not (await asyncio.wait([events], timeout=_COMPARE_EVERY_S))[0]:
                        await self._compare(reconcile)  # also notices what events did not report
                    await events
            except ServerAway as error:
                if not away:
                    log.error("%s; retrying", error)
                away = True
            except GatewayError as error:
                log.error("the Docker Engine at %s: %s", self._engine.url, error)
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                # An unexpected answer or a full disk must not end the watch: the ends of containers
                # would not be noticed any more.
                log.exception("watching the Docker Engine at %s failed; retrying", self._engine.url)
            self._compared.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _events(self) -> AsyncIterator[asyncio.Task[None]]:
        """A task that handles events from now on; it ends when the Engine closes the stream."""
        listening = asyncio.Event()
        task = asyncio.create_task(self._follow_events(listening))
        listened = asyncio.create_task(listening.wait())
        try:
            await asyncio.wait([task, listened], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            yield task
        finally:
            for pending in (task, listened):
                pending.cancel()
            await asyncio.gather(task, listened, return_exceptions=True)

    async def _follow_events(self, listening: asyncio.Event) -> None:
        async with contextlib.aclosing(self._engine.endings(listening)) as endings:
            async for name, status in endings:
                if (instance := self._instances.get(name)) is not None:
                    await self._handle_end(instance, ended_with(status))
        raise self._engine.away("it closed the stream of events")

    async def _handle_end(self, instance: ContainerInstance, why: str) -> None:
        """An event has the exit status alone: ask whether memory was lacking."""
        instance.ready = False
        state = await self._inspected(instance)
        if state is not None and not state.running:
            why = state.why
        instance.set_ended(why)

    async def _compare(self, reconcile: Reconcile) -> None:
        # Read before the Engine is asked: its answer misses containers that start meanwhile.
        instances = [instance for instance in self._instances.values() if instance.started]
        present = {container.name: container for container in await self._engine.containers()}
        for instance in instances:
            container = present.get(instance.name)
            if container is None:
                instance.set_ended("is gone: another program removed it")
            elif not container.running:  # unless the list is older than the container's start
                state = await self._inspected(instance)
                if state is None or not state.running:
                    instance.set_ended("is stopped" if state is None else state.why)
        await reconcile(
            [container for container in present.values() if container.name not in self._instances]
        )

    async def _inspected(self, instance: ContainerInstance) -> ContainerState | None:
        """None also if the Engine does not answer: its end is known already."""
        try:
            return await self._engine.inspect(instance.name, self._network)
        except ProviderFailed:
            return None

    async def _set_started(self, instance: ContainerInstance) -> None:
        state = await self._engine.inspect(instance.name, self._network)
        if state is None:
            instance.set_ended("is gone: another program removed it")
        elif not state.running:
            instance.set_ended(state.why)
        elif state.address:
            instance.set_started(state.address)
        else:
            raise ProviderFailed(f"it has no address in the network {self._network}")
