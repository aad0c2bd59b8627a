"""All containers of this gateway: starts, adopts and watches them, also across Engine failures."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from secrets import token_hex

from gateway_ext.errors import GatewayError, ProviderFailed
from gateway_ext.providers.docker.container_spec import Release, network
from gateway_ext.providers.docker.engine import (
    ContainerState,
    EngineAway,
    EngineClient,
    ListedContainer,
    ended_with,
)
from gateway_ext.providers.docker.instance import ContainerInstance
from gateway_ext.providers.managed.logs import FunctionLog
from gateway_ext.settings import GatewaySettings

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0
_COMPARE_EVERY_S = 15.0
Reconcile = Callable[[Sequence[ListedContainer]], Awaitable[None]]


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
            except EngineAway as error:
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
        raise EngineAway(self._engine.url, "it closed the stream of events")

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
