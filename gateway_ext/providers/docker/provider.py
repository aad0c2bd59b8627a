"""Runs functions as containers of a Docker Engine, and adopts those that run already."""

import asyncio
import io
import logging
import re
import tarfile
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from common.tasks import BackgroundTasks
from gateway_ext.errors import BadDeployment, BadRequest, ProviderFailed
from gateway_ext.model import Deployment
from gateway_ext.openfaas import function_options
from gateway_ext.ports import FunctionListener, Injection
from gateway_ext.providers.docker import container_spec
from gateway_ext.providers.docker.container_spec import Release, ReleaseRecord
from gateway_ext.providers.docker.engine import RELEASE, EngineClient, EngineImage, ListedContainer
from gateway_ext.providers.docker.fleet import ContainerFleet, ContainerInstance
from gateway_ext.providers.docker.images import ImagePulls
from gateway_ext.providers.function_environment import gpu_environment, injected_digest
from gateway_ext.providers.http_api import ServerAway, ServerRefused
from gateway_ext.providers.managed.function import InstanceUsage, ManagedFunction
from gateway_ext.providers.managed.logs import FunctionLog
from gateway_ext.providers.managed.provider import ManagedProvider
from gateway_ext.providers.managed.records import RecordStore
from gateway_ext.providers.managed.replicas import ManagedSettings, ReplicaSet
from gateway_ext.settings import GatewaySettings

log = logging.getLogger(__name__)

_NO_IMAGE = "no such image"
_FILE_MODE = 0o444  # of secrets
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,30}")
_PULLS = frozenset({"missing", "always", "never"})


@dataclass(frozen=True, slots=True)
class DockerBounds(ManagedSettings):
    """Bounds on pulls, too, and the port at which containers are called."""

    pull_answer_s: float = 15.0
    pull_quiet_s: float = 600.0
    port: int = 8080


class SecretVolumes:
    """Secrets of functions in volumes of one gateway; `value` returns the content of a secret.

    Volumes are filled through the Engine's API, so that the gateway may run in a container or on
    another machine, where a folder of its own could not be mounted. Each release has one volume,
    mounted read-only; every user in the container may read its files.
    """

    def __init__(self, engine: EngineClient, name: str, value: Callable[[str, str], bytes]) -> None:
        self._engine = engine
        self._name = name
        self._value = value
        self._filled: set[str] = set()
        self._filling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._fillers: set[str] = set()

    async def ready(self, release: Release) -> str:
        """Empty if the release has no secrets."""
        if not release.deployment.secrets:
            return ""
        name = self._volume_of(release)
        async with self._filling[release.id]:
            if release.id not in self._filled or not await self._engine.has_volume(name):
                await self._write(release)
        return name

    async def fill(self, release: Release) -> None:
        if release.image is None or not release.deployment.secrets:
            return
        async with self._filling[release.id]:  # else an older value could be written last
            await self._write(release)

    def fills(self, container: str) -> bool:
        return container in self._fillers

    async def remove(self, release: Release) -> None:
        """Delete the volume of a release that no container belongs to."""
        self._filled.discard(release.id)
        self._filling.pop(release.id, None)
        if release.deployment.secrets:
            await self._engine.remove_volume(self._volume_of(release))

    async def prune(self, releases: Callable[[], Collection[str]]) -> None:
        """Delete volumes of unknown releases."""
        # Volumes are listed first: a release becomes known before its volume is made.
        present = await self._engine.volumes()
        ids = releases()
        for name, labels in present.items():
            if labels.get(RELEASE, "") not in ids:
                await self._engine.remove_volume(name)

    async def _write(self, release: Release) -> None:
        assert release.image is not None, "secrets are written once the image is there"
        self._filled.discard(release.id)  # if this fails, the next start of a container fills it
        volume, labels = self._volume_of(release), {**self._engine.labels, RELEASE: release.id}
        await self._engine.make_volume(volume, labels)
        filler = f"{self._name}-filler-{token_hex(4)}"
        self._fillers.add(filler)
        try:
            await self._engine.create(
                filler, container_spec.filler(release.image.id, volume, labels)
            )
            try:
                await self._engine.put(filler, container_spec.SECRETS, self._archive(release))
            finally:
                await self._engine.remove(filler)
        finally:
            self._fillers.discard(filler)
        self._filled.add(release.id)

    def _volume_of(self, release: Release) -> str:
        return f"{self._name}-secrets-{release.id}"

    def _archive(self, release: Release) -> bytes:
        namespace = release.deployment.id.namespace
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name in release.deployment.secrets:
                value = self._value(namespace, name)
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(value), _FILE_MODE
                tar.addfile(entry, io.BytesIO(value))
        return packed.getvalue()


@dataclass(frozen=True, slots=True)
class DockerParts:
    """What all functions of a docker provider share."""

    settings: GatewaySettings
    bounds: DockerBounds
    engine: EngineClient
    fleet: ContainerFleet
    images: ImagePulls
    volumes: SecretVolumes
    injection: Injection | None

    def check(self, deployment: Deployment, image: EngineImage) -> None:
        """BadDeployment if the function uses a GPU and its image has no shim."""
        wants_gpu = self.injection is not None and function_options.of(deployment).gpu
        if wants_gpu and not image.has_our_template:
            name = deployment.image
            raise BadDeployment(f"image {name} is not built on a template of ours: it has no shim")


class ContainerVersion(ReplicaSet[ContainerInstance]):
    """Replicas of one release, whose image is on the Engine."""

    starting = "its container takes no calls yet"

    def __init__(
        self,
        release: Release,
        parts: DockerParts,
        log: FunctionLog,
        changed: Callable[[], None],
        running: Iterable[ContainerInstance] = (),
    ) -> None:
        super().__init__(changed, log, parts.bounds, running)
        self.release = release
        self._parts = parts

    @property
    def deployment(self) -> Deployment:
        return self.release.deployment

    async def make(self) -> ContainerInstance:
        try:
            return await self._start()
        except ServerRefused as refused:
            if _NO_IMAGE not in refused.message.lower() or self.release.image is None:
                raise
        # The image was deleted while no container of it existed.
        image = await self._parts.engine.image(self.release.image.id)
        image = image or await self._parts.images.ready(self.deployment.image)
        self.release = replace(self.release, image=image)
        return await self._start()

    async def _start(self) -> ContainerInstance:
        parts = self._parts
        volume = await parts.volumes.ready(self.release)
        injected = gpu_environment(parts.injection, self.deployment)
        limits = self.deployment.limits
        cores = await parts.engine.cores() if limits and limits.cpu else 1
        body = container_spec.container(
            self.release, parts.settings, parts.engine.labels, injected, volume, cores
        )
        return await parts.fleet.start(body, self.release, self.log)


class ContainerFunction(ManagedFunction[ReleaseRecord, ContainerVersion]):
    """A deployed function; after a restart of the gateway its containers are adopted."""

    note_suffix = "deploy"
    usage_over_s = 0.5

    def __init__(
        self,
        record: ReleaseRecord,
        parts: DockerParts,
        store: RecordStore[ReleaseRecord],
        listener: FunctionListener,
    ) -> None:
        super().__init__(record, store, parts.bounds, listener)
        self._parts = parts
        self.resumed = False  # before that its containers are not known
        self._tidying = BackgroundTasks(log, "deleting secrets")

    async def resume(self, containers: Sequence[ListedContainer]) -> None:
        """Adopt its running containers, and start the missing ones."""
        running = await self._adopted(containers)
        self.resumed = True
        record = self.record
        serving = record.before if record.before is not None else record.release
        if serving.image is not None:
            adopted = running.get(serving.id, [])
            self.start_with(self._version(serving, adopted))
        if record.before is not None or record.release.image is None:
            coming = running.get(record.release.id, [])
            self.replace_version(lambda: self._make(record.release, coming))

    def begin(self) -> None:
        """Store the record and start its release; the current release serves until it is ready."""
        self.resumed = True
        self._store.save(self.record)
        release = self.record.release
        self.replace_version(lambda: self._make(release))

    def update(self, release: Release, wanted: int) -> None:
        if not self.resumed:
            serving = self.record.before or self.record.release
            before = serving if serving.image is not None else None
            self.record = replace(self.record, release=release, before=before, wanted=wanted)
            self._store.save(self.record)
            return
        current = self.current
        before = current.release if current is not None else None
        self.record = replace(self.record, release=release, before=before, wanted=wanted)
        self.begin()

    async def stop(self, *, drain: bool) -> None:
        """The secrets of its releases are deleted too."""
        releases = {release.id: release for release in self.releases}
        await super().stop(drain=drain)
        for release in releases.values():
            await self._tidy(release)

    async def detach(self) -> None:
        """Leave its containers running for the next gateway."""
        self._tidying.cancel()
        await super().detach()

    @property
    def secrets(self) -> set[str]:
        return {name for release in self.releases for name in release.deployment.secrets}

    @property
    def releases(self) -> list[Release]:
        """Releases that containers run of, now or soon; a release may be listed twice."""
        return [*self.record.releases, *(version.release for version in self.present)]

    def took_over(self, version: ContainerVersion) -> None:
        """Forget the release before this one: the next gateway must not start it again."""
        if version.release.id == self.record.release.id:
            self.record = replace(self.record, before=None)
            try:
                self._store.save(self.record)
            except OSError as error:  # the next change stores it; no caller waits for this one
                text = "the next gateway starts the previous release once more"
                log.error("%s: %s: %s", self.deployment.id, text, error)

    def instances_ended(self, version: ContainerVersion) -> None:
        """Delete the secrets of a release that no container belongs to any more."""
        if version.release.id not in {release.id for release in self.releases}:
            self._tidying.start(self._tidy(version.release))

    async def _adopted(
        self, containers: Iterable[ListedContainer]
    ) -> Mapping[str, list[ContainerInstance]]:
        instances: dict[str, list[ContainerInstance]] = {
            release.id: [] for release in self.record.releases
        }
        try:
            for container in containers:
                instance = await self._adopt(container)
                if instance is not None:
                    instances[container.release].append(instance)
        except BaseException:
            for instance in (one for several in instances.values() for one in several):
                self._parts.fleet.forget(instance.name)  # the next comparison adopts them again
            raise
        return instances

    async def _adopt(self, container: ListedContainer) -> ContainerInstance | None:
        """None for a container of no known release, which the provider removes."""
        release = next(
            (release for release in self.record.releases if release.id == container.release), None
        )
        if release is None or not container.running:
            return None
        try:
            return await self._parts.fleet.adopt(container.name, release, self.log)
        except ServerAway:
            raise
        except ProviderFailed as error:
            log.warning("container %s is not adopted: %s", container.name, error)
            return None

    async def _make(
        self, release: Release, running: Iterable[ContainerInstance] = ()
    ) -> ContainerVersion:
        if release.image is None:
            self.note(f"image {release.deployment.image} is on its way")
            image = await self._image(release.deployment.image)
            self._parts.check(release.deployment, image)
            release = replace(release, image=image)
            if self.record.release.id == release.id:
                self.record = replace(self.record, release=release)
                self._store.save(self.record)
        return self._version(release, running)

    async def _image(self, name: str) -> EngineImage:
        """Try until the image is there; BadDeployment ends it, a failing registry does not."""
        bounds = self._parts.bounds
        pause_s = bounds.first_pause_s
        while True:
            try:
                return await self._parts.images.ready(name)
            except ProviderFailed as error:
                self.report_failure(f"{error}; it is tried again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, bounds.longest_pause_s)

    def _version(
        self, release: Release, running: Iterable[ContainerInstance] = ()
    ) -> ContainerVersion:
        return ContainerVersion(release, self._parts, self.log, self.changed, running)

    async def _tidy(self, release: Release) -> None:
        try:
            await self._parts.volumes.remove(release)
        except ProviderFailed as error:
            log.warning("secrets of %s are removed later: %s", self.deployment.id, error)

    async def _measure(self) -> Sequence[InstanceUsage]:
        names = [one.name for version in self.versions for one in version.instances]
        return await asyncio.gather(*(self._parts.engine.usage(name) for name in names))


class DockerProvider(ManagedProvider[ContainerFunction, ReleaseRecord]):
    """Implements `gateway_ext.ports.Provider`."""

    name = "docker"

    def __init__(
        self,
        settings: GatewaySettings,
        injection: Injection | None = None,
        bounds: DockerBounds | None = None,
    ) -> None:
        check_settings(settings)
        bounds = bounds or DockerBounds(drain_s=settings.drain_s)
        super().__init__(RecordStore(Path(settings.state_dir) / "containers", ReleaseRecord))
        name, registries = settings.docker_name, settings.docker_config
        tls = Path(settings.docker_tls_dir) if settings.docker_tls_dir else None
        engine = EngineClient(settings.docker_url, name, tls, bounds.pull_quiet_s)
        self._parts = DockerParts(
            settings,
            bounds,
            engine,
            ContainerFleet(engine, settings, bounds.port),
            ImagePulls(engine, settings.docker_pull, Path(registries) if registries else None),
            SecretVolumes(engine, name, self._secrets.value),
            injection,
        )
        self._background = BackgroundTasks(log, "watching containers")
        self._clearing: asyncio.Task[None] | None = None

    async def start(self, listener: FunctionListener) -> None:
        """Report the stored functions, and adopt their containers as soon as the Engine answers."""
        records = await self._opened(listener)
        self._parts.engine.open()
        for record in records:
            self._add(self._renewed(record)).notify()
        self._background.start(self._parts.fleet.watch(self._reconcile))
        await self._parts.fleet.first_comparison()

    async def close(self) -> None:
        """Leave containers running for the next gateway."""
        if not self._store.is_ours:
            return  # another gateway uses the state folder and its containers
        functions, self._functions = list(self._functions.values()), {}
        if self._leaving:  # the next gateway removes what is left after this time
            patience_s = self._parts.bounds.drain_s + self._parts.bounds.stop_s
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
        image = await self._parts.images.within(deployment.image, self._parts.bounds.pull_answer_s)
        if image is not None:
            self._parts.check(deployment, image)
        async with self._deploying:
            self._check(deployment, update=update)  # again: the pull took time
            injected = injected_digest(gpu_environment(self._parts.injection, deployment))
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
        self._secrets.put(namespace, name, value, new=False)
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
            for function_id, function in list(self._functions.items()):
                if not function.resumed:
                    await function.resume(by_function.get(str(function_id), []))
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
            injected = injected_digest(gpu_environment(self._parts.injection, release.deployment))
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

    async def _take_down(self, function: ContainerFunction) -> None:
        try:
            await function.stop(drain=True)
        finally:
            await asyncio.to_thread(self._store.discard, function.record.folder)


def check_settings(settings: GatewaySettings) -> None:
    """BadRequest names the value that is not allowed."""
    name, network, pull = settings.docker_name, settings.docker_network, settings.docker_pull
    if not _NAME.fullmatch(name):
        raise BadRequest(f"docker_name: {name!r}: letters, digits, `_`, `.`, `-` (31)")
    if not _NAME.fullmatch(network):
        raise BadRequest(f"docker_network: {network!r} is no name of a network")
    if pull not in _PULLS:
        raise BadRequest(f"docker_pull: {pull!r}: {', '.join(sorted(_PULLS))} is expected")
