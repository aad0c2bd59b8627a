"""Runs functions as containers of a Docker Engine, and adopts those that run already."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from common.tasks import BackgroundTasks
from gateway_ext.errors import BadDeployment, ProviderFailed
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options
from gateway_ext.ports import FunctionListener, Injection
from gateway_ext.providers.docker import container_spec
from gateway_ext.providers.docker.engine import (
    EngineClient,
    ListedContainer,
)
from gateway_ext.providers.docker.fleet import ContainerFleet
from gateway_ext.providers.docker.function import ContainerFunction, DockerParts
from gateway_ext.providers.docker.images import ImagePulls
from gateway_ext.providers.docker.releases import Release, ReleaseRecord
from gateway_ext.providers.docker.secret_volumes import SecretVolumes
from gateway_ext.providers.docker.settings import DockerSettings
from gateway_ext.providers.function_environment import injected_digest
from gateway_ext.providers.managed.provider import ManagedProvider
from gateway_ext.providers.managed.records import RecordStore

log = logging.getLogger(__name__)


class DockerProvider(ManagedProvider[ContainerFunction, ReleaseRecord]):
    """Implements `gateway_ext.ports.Provider`."""

    name = "docker"

    def __init__(self, settings: DockerSettings, injection: Injection | None = None) -> None:
        settings.check()
        self._settings = settings
        self._store = RecordStore(settings.state, ReleaseRecord)
        super().__init__(self._store)
        engine = EngineClient(settings.url, settings.name, settings.tls, settings.pull_quiet_s)
        self._parts = DockerParts(
            settings,
            engine,
            ContainerFleet(engine, settings),
            ImagePulls(engine, settings.pull, settings.registries),
            SecretVolumes(engine, settings.name, self._secrets.value),
            injection,
        )
        self._resuming: dict[FunctionId, ContainerFunction] = {}  # their containers are not known
        self._background = BackgroundTasks(log, "watching containers")
        self._clearing: asyncio.Task[None] | None = None

    async def start(self, listener: FunctionListener) -> None:
        """Report the stored functions, and adopt their containers as soon as the Engine answers."""
        records = await self._opened(listener)
        self._parts.engine.open()
        for record in records:
            function = self._add(self._renewed(record))
            self._resuming[function.deployment.id] = function
            function.notify()
        self._background.start(self._parts.fleet.watch(self._reconcile))
        await self._parts.fleet.first_comparison()

    async def close(self) -> None:
        """Leave containers running for the next gateway."""
        if not self._store.is_ours:
            return  # another gateway uses the state folder and its containers
        functions, self._functions = list(self._functions.values()), {}
        if self._leaving:  # the next gateway removes what is left after this time
            patience_s = self._settings.drain_s + self._settings.stop_s
            await asyncio.wait(list(self._leaving), timeout=patience_s)
        for task in self._leaving:
            task.cancel()
        await self._background.close()
        await asyncio.gather(*(function.detach() for function in functions))
        if not functions:
            await self._parts.fleet.remove_network()
        await self._parts.images.close()
        await self._parts.engine.close()
        self._store.give_back()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept a deployment; a bad image is refused if it is known within `pull_answer_s`."""
        options = function_options.of(deployment)
        container_spec.check(deployment)
        self._check(deployment, update=update)
        image = await self._parts.images.within(deployment.image, self._settings.pull_answer_s)
        if image is not None:
            self._parts.check(deployment, image)
        async with self._deploying:
            self._check(deployment, update=update)  # again: the pull took time
            injected = injected_digest(self._parts.injected(deployment))
            release = Release(token_hex(6), deployment, image, injected)
            function = self._functions.get(deployment.id)
            if function is not None:
                function.update(release, max(function.wanted, options.scale_min))
            else:
                folder = await asyncio.to_thread(self._store.new_folder, deployment.id)
                now, wanted = datetime.now(UTC), options.scale_min
                function = self._add(ReleaseRecord(release, None, folder, now, wanted))
                function.begin()
        if passed_over := container_spec.ignored(deployment):
            text = f"constraints mean nothing to one Docker Engine: {', '.join(passed_over)}"
            log.warning("%s: %s", deployment.id, text)
            function.note(text)

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """Store a value, and write it to the volumes of all releases that mount the secret."""
        self._secrets.update(namespace, name, value)
        functions = self._using(namespace, name)
        releases = {release.id: release for one in functions for release in one.releases}
        failed: list[ProviderFailed] = []
        for release in releases.values():
            if name in release.deployment.secrets:
                try:
                    await self._parts.volumes.fill(release)
                except ProviderFailed as error:
                    failed.append(error)  # the others get the value all the same
        if failed:
            raise failed[0]

    # -- what runs on the Engine ----------------------------------------------------------------

    async def _reconcile(self, unclaimed: Sequence[ListedContainer]) -> None:
        """Have functions adopt their containers; remove containers of no known function."""
        by_function: defaultdict[str, list[ListedContainer]] = defaultdict(list)
        for container in unclaimed:
            by_function[container.function].append(container)
        async with self._deploying:
            for function_id, function in list(self._resuming.items()):
                await function.resume(by_function.get(str(function_id), []))
                del self._resuming[function_id]
        if self._clearing is None or self._clearing.done():  # else at the next comparison
            self._clearing = self._background.start(self._clear(unclaimed))

    async def _clear(self, unclaimed: Sequence[ListedContainer]) -> None:
        parts = self._parts
        for container in unclaimed:
            if not parts.fleet.has(container.name) and not parts.volumes.fills(container.name):
                log.info("container %s belongs to no function any more: removed", container.name)
                await self._try(parts.engine.remove(container.name))
        await self._try(parts.volumes.prune(self._releases))

    async def _try(self, removal: Coroutine[Any, Any, None]) -> None:
        """A removal that fails is tried again at the next comparison."""
        try:
            await removal
        except ProviderFailed as error:
            log.warning("a leftover of a removed function is still there: %s", error)

    def _releases(self) -> set[str]:
        present = [*self._functions.values(), *self._leaving.values()]
        return {release.id for record in present for release in record.releases}

    def _renewed(self, record: ReleaseRecord) -> ReleaseRecord:
        """A new release if the variables that activate the shim have changed, else the record."""
        release = record.release
        try:
            injected = injected_digest(self._parts.injected(release.deployment))
        except BadDeployment:  # an earlier gateway took it: told where it cannot be served
            return record
        if injected == release.injected:
            return record
        before = record.before if record.before is not None else release
        renewed = replace(release, id=token_hex(6), injected=injected)
        return replace(record, release=renewed, before=before if before.image else None)

    def _add(self, record: ReleaseRecord) -> ContainerFunction:
        function = ContainerFunction(record, self._parts, self._store, self._listener)
        self._functions[record.deployment.id] = function
        return function

    def _forget(self, function: ContainerFunction) -> None:
        self._resuming.pop(function.deployment.id, None)
        super()._forget(function)

    async def _take_down(self, function: ContainerFunction) -> None:
        try:
            await function.stop(drain=True)
        finally:
            await asyncio.to_thread(self._store.discard, function.record.folder)
