"""Runs functions as containers of a Docker Engine, and goes on with those that run already."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from gateway_ext import wishes
from gateway_ext.errors import (
    ProviderFailed,
    UnknownFunction,
)
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.ports import Injection, Listener
from gateway_ext.providers.docker import spec
from gateway_ext.providers.docker.engine import Container, Engine, Image
from gateway_ext.providers.docker.fleet import Fleet
from gateway_ext.providers.docker.function import Function
from gateway_ext.providers.docker.generation import Kit
from gateway_ext.providers.docker.images import Images
from gateway_ext.providers.docker.settings import DockerSettings
from gateway_ext.providers.docker.store import Record, Release, Store
from gateway_ext.providers.docker.transport import Transport
from gateway_ext.providers.docker.volumes import Volumes
from gateway_ext.providers.kept import KeptFunctions

log = logging.getLogger(__name__)


class DockerProvider(KeptFunctions[Function]):
    """Implements `gateway_ext.ports.Provider`."""

    name = "docker"

    def __init__(self, settings: DockerSettings, injection: Injection | None = None) -> None:
        settings.check()
        self._settings = settings
        self._store = Store(settings.state)
        super().__init__(self._store.folder)
        self._transport = Transport(settings.url, settings.tls)
        engine = Engine(self._transport, settings.name)
        self._kit = Kit(
            settings,
            engine,
            Fleet(engine, settings),
            Images(engine, settings.pull, settings.registries),
            Volumes(engine, settings.name, self._secrets.value),
            injection,
        )
        self._resuming: dict[FunctionId, Function] = {}  # until the Engine was asked about them
        self._leaving: dict[asyncio.Task[None], Function] = {}
        self._deploying = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._clearing: asyncio.Task[None] | None = None
        self._listener: Listener

    async def start(self, listener: Listener) -> None:
        """Go on with what was deployed; an Engine that is away is waited for behind."""
        self._listener = listener
        records = await asyncio.to_thread(self._store.open)
        self._namespaces.open()
        self._transport.open()
        for record in records:
            function = self._add(self._renewed(record))
            self._resuming[function.deployment.id] = function
            function.tell()
        self._watching = asyncio.create_task(self._kit.fleet.watch(self._settle))
        self._watching.add_done_callback(_say_failure)
        await self._kit.fleet.first_look()

    async def close(self) -> None:
        """Containers go on, and are found by the next gateway; or end, where that is set."""
        if not self._store.lock.ours:
            return  # what runs there is another gateway's
        functions, self._functions = list(self._functions.values()), {}
        if self._settings.stop_at_end:
            await asyncio.gather(*(function.stop(drain=False) for function in functions))
        if self._leaving:  # what is not gone by then, the next gateway removes
            patience_s = self._settings.drain_s + self._settings.stop_s
            await asyncio.wait(list(self._leaving), timeout=patience_s)
        for task in self._leaving:
            task.cancel()
        looking = [one for one in (self._watching, self._clearing) if one is not None]
        for task in looking:
            task.cancel()
        if looking:
            await asyncio.wait(looking)
        if not self._settings.stop_at_end:
            await asyncio.gather(*(function.let_go() for function in functions))
        if self._settings.stop_at_end or not functions:
            await self._kit.fleet.remove_network()
        await self._kit.images.close()
        await self._transport.close()
        self._store.lock.give_back()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept it. What is wrong with its image is told if that is known soon enough."""
        wished = wishes.of(deployment)
        spec.check(deployment)
        self._check(deployment, update=update)
        image = await self._kit.images.within(deployment.image, self._settings.pull_answer_s)
        if image is not None:
            self._kit.check(deployment, image)
        async with self._deploying:
            self._check(deployment, update=update)  # it was waited meanwhile
            release = self._release(deployment, image)
            function = self._functions.get(deployment.id)
            if function is not None:
                function.update(release, max(function.wanted, wished.scale_min))
            else:
                function = self._add(await self._new_record(release, wished.scale_min))
                function.begin()
        if passed_over := spec.ignored(deployment):
            text = f"constraints mean nothing to one Docker Engine: {', '.join(passed_over)}"
            log.warning("%s: %s", deployment.id, text)
            function.say(text)

    async def remove(self, function: FunctionId) -> None:
        """Forget it at once; its containers end behind, when their calls have."""
        async with self._deploying:
            found = self._functions.pop(function, None)
            if found is None:
                raise UnknownFunction(function)
            self._resuming.pop(function, None)
            self._store.forget(found.record)
            self._listener.function_gone(function)
        task = asyncio.create_task(self._take_down(found))
        self._leaving[task] = found
        task.add_done_callback(self._taken_down)

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """Functions that have it mounted see the new value in their file."""
        self._secrets.update(namespace, name, value)
        failed: list[ProviderFailed] = []
        for function in self._using(namespace, name):
            try:
                await function.refresh_secrets(name)
            except ProviderFailed as error:
                failed.append(error)  # the other functions are to have it all the same
        if failed:
            raise failed[0]

    # -- what runs on the Engine ----------------------------------------------------------------

    async def _settle(self, unclaimed: Sequence[Container]) -> None:
        """Functions go on with their containers; of others that are ours nobody knows any more."""
        by_function: defaultdict[str, list[Container]] = defaultdict(list)
        for container in unclaimed:
            by_function[container.function].append(container)
        async with self._deploying:
            for function_id, function in list(self._resuming.items()):
                await function.resume(by_function.get(str(function_id), []))
                del self._resuming[function_id]
        if self._clearing is None or self._clearing.done():  # else with the next look
            self._clearing = asyncio.create_task(self._clear(unclaimed))
            self._clearing.add_done_callback(_say_failure)

    async def _clear(self, unclaimed: Sequence[Container]) -> None:
        kit = self._kit
        for container in unclaimed:
            if not kit.fleet.has(container.name) and not kit.volumes.fills(container.name):
                log.info("container %s is nobody's any more: removed", container.name)
                await self._try(kit.engine.remove(container.name))
        await self._try(kit.volumes.prune(self._releases))

    async def _try(self, removal: Coroutine[Any, Any, None]) -> None:
        """What cannot be removed now is tried again with the next look."""
        try:
            await removal
        except ProviderFailed as error:
            log.warning("what is nobody's is still there: %s", error)

    def _releases(self) -> set[str]:
        present = [*self._functions.values(), *self._leaving.values()]
        return {one.id for each in present for one in each.releases}

    def _renewed(self, record: Record) -> Record:
        """Another release, where a function would be told otherwise today who its manager is."""
        release = record.release
        injected = spec.lasting(self._kit.injected(release.deployment))
        if injected == release.injected:
            return record
        before = record.before if record.before is not None else release
        renewed = replace(release, id=token_hex(6), injected=injected)
        return replace(record, release=renewed, before=before if before.image else None)

    def _add(self, record: Record) -> Function:
        function = Function(record, self._kit, self._store, self._listener)
        self._functions[record.release.deployment.id] = function
        return function

    def _check(self, deployment: Deployment, *, update: bool) -> None:
        self._namespaces.check(deployment.id.namespace)
        if update:
            self._found(deployment.id)
        self._check_secrets(deployment)

    def _release(self, deployment: Deployment, image: Image | None) -> Release:
        injected = spec.lasting(self._kit.injected(deployment))
        return Release(token_hex(6), deployment, image, injected)

    async def _new_record(self, release: Release, wanted: int) -> Record:
        folder = await asyncio.to_thread(self._store.new_folder, release.deployment.id)
        return Record(release, None, folder, datetime.now(UTC), wanted)

    async def _take_down(self, function: Function) -> None:
        try:
            await function.stop(drain=True)
        finally:
            await asyncio.to_thread(self._store.discard, function.record.folder)

    def _taken_down(self, task: asyncio.Task[None]) -> None:
        function = self._leaving.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            told = None if isinstance(error, ProviderFailed) else error
            log.error("%s was not removed well: %s", function.deployment.id, error, exc_info=told)


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("containers are looked after no longer", exc_info=error)
