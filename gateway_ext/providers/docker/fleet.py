"""All containers of this gateway: started, adopted, and watched, whatever the Engine does."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from secrets import token_hex

from gateway_ext.errors import GatewayError, ProviderFailed
from gateway_ext.providers.docker.engine import Container, Engine, Inspected, ended_with
from gateway_ext.providers.docker.instance import Instance, Place
from gateway_ext.providers.docker.settings import DockerSettings
from gateway_ext.providers.docker.spec import network
from gateway_ext.providers.docker.transport import EngineAway

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0
_LOOK_AGAIN_S = 15.0
Settle = Callable[[Sequence[Container]], Awaitable[None]]


class Fleet:
    """Instances by name; an instance is here from before its container is made until it is gone."""

    def __init__(self, engine: Engine, settings: DockerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._instances: dict[str, Instance] = {}
        self._looked = asyncio.Event()
        self._network = asyncio.Lock()

    async def start(self, body: Mapping[str, object], place: Place) -> Instance:
        """A new container that runs; nothing is left of one that does not."""
        name = f"{self._settings.name}-{place.function.name[:40]}-{token_hex(4)}"
        instance = self._instances[name] = Instance(name, self._engine, place, self.forget)
        try:
            await self.make_network()
            await self._engine.create(name, body)
            await self._engine.start(name)
            await self._settle_in(instance)
        except BaseException:
            await asyncio.shield(self._give_up(name))
            raise
        return instance

    async def adopt(self, container: Container, place: Place) -> Instance | None:
        """One that runs already; None where it has ended meanwhile."""
        name = container.name
        instance = self._instances[name] = Instance(name, self._engine, place, self.forget)
        try:
            await instance.goes_on()
            await self._settle_in(instance)
        except BaseException:
            self.forget(name)
            raise
        if instance.exited.done():
            self.forget(name)
            return None
        return instance

    async def make_network(self) -> None:
        """The one that functions are in; one that is there is taken as it is."""
        name = self._settings.network
        async with self._network:  # an Engine makes two of one name if it is asked at once
            if not await self._engine.has_network(name):
                await self._engine.make_network(network(name, self._engine.labels))

    async def remove_network(self) -> None:
        """Once no function needs it."""
        try:
            await self._engine.remove_network(self._settings.network)
        except ProviderFailed as error:
            log.warning("the network %s is still there: %s", self._settings.network, error)

    async def watch(self, settle: Settle) -> None:
        """From now on: what ends is told; whenever the Engine is back, all is compared.

        `settle` is given containers that nobody has.
        """
        try:
            await self._watch(settle)
        finally:
            self._looked.set()  # whoever waits for the first look waits for nothing now

    def has(self, name: str) -> bool:
        """Whether somebody has this container."""
        return name in self._instances

    def forget(self, name: str) -> None:
        """Nobody has it any more."""
        self._instances.pop(name, None)

    async def first_look(self) -> None:
        """Until the Engine was asked once, whether it answered or not."""
        await self._looked.wait()

    async def _watch(self, settle: Settle) -> None:
        pause_s = _FIRST_PAUSE_S
        away = False
        while True:
            try:
                async with self._events() as events:
                    await self._compare(settle)
                    if away:
                        log.info("the Docker Engine at %s answers again", self._engine.url)
                    away, pause_s = False, _FIRST_PAUSE_S
                    self._looked.set()
                    while not (await asyncio.wait([events], timeout=_LOOK_AGAIN_S))[0]:
                        await self._compare(settle)  # it answers, and no word of it was lost
                    await events
            except EngineAway as error:
                if not away:
                    log.error("%s; it is asked again", error)
                away = True
            except GatewayError as error:
                log.error("the Docker Engine at %s: %s", self._engine.url, error)
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                # An answer of a form that nobody thought of, or a disk that is full: what ends
                # would not be noticed any more if this ended here.
                log.exception("the Docker Engine at %s is looked at again", self._engine.url)
            self._looked.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _events(self) -> AsyncIterator[asyncio.Task[None]]:
        """What happens from here on; the task ends when the Engine breaks off."""
        listening = asyncio.Event()
        task = asyncio.create_task(self._hear(listening))
        heard = asyncio.create_task(listening.wait())
        try:
            await asyncio.wait([task, heard], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            yield task
        finally:
            for one in (task, heard):
                one.cancel()
            await asyncio.gather(task, heard, return_exceptions=True)

    async def _hear(self, listening: asyncio.Event) -> None:
        async with contextlib.aclosing(self._engine.endings(listening)) as endings:
            async for name, status in endings:
                if (instance := self._instances.get(name)) is not None:
                    await self._has_ended(instance, ended_with(status))
        raise EngineAway(self._engine.url, "it broke off")

    async def _has_ended(self, instance: Instance, why: str) -> None:
        """The event says the status alone; whether memory was lacking has to be asked."""
        instance.ready = False
        found = await self._asked(instance)
        if found is not None and not found.running:
            why = found.why
        instance.ended(why)

    async def _compare(self, settle: Settle) -> None:
        # Taken before the Engine is asked: its answer knows nothing of what starts meanwhile.
        known = [one for one in self._instances.values() if one.started]
        present = {one.name: one for one in await self._engine.containers()}
        for instance in known:
            container = present.get(instance.name)
            if container is None:
                instance.ended("is gone: somebody removed it")
            elif not container.running:
                await self._is_listed_as_ended(instance)
        await settle([one for one in present.values() if one.name not in self._instances])

    async def _is_listed_as_ended(self, instance: Instance) -> None:
        """The list may be older than the container's start."""
        found = await self._asked(instance)
        if found is None or not found.running:
            instance.ended("is stopped" if found is None else found.why)

    async def _asked(self, instance: Instance) -> Inspected | None:
        """None also where the Engine does not say: that it has ended is known without it."""
        try:
            return await self._engine.inspect(instance.name, self._settings.network)
        except ProviderFailed:
            return None

    async def _settle_in(self, instance: Instance) -> None:
        found = await self._engine.inspect(instance.name, self._settings.network)
        if found is None:
            instance.ended("is gone: somebody removed it")
        elif not found.running:
            instance.ended(found.why)
        else:
            self._check_address(found.address)
            instance.runs_at(found.address)

    def _check_address(self, address: str) -> None:
        if not address:
            raise ProviderFailed(f"it has no address in the network {self._settings.network}")

    async def _give_up(self, name: str) -> None:
        try:
            await self._engine.remove(name)
        except ProviderFailed as error:
            log.warning("container %s is removed later: %s", name, error)
        finally:
            self.forget(name)
