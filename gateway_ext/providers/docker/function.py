"""One function: what is wanted of it, kept on disk and brought about on the Engine."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment, FunctionStatus, Usage
from gateway_ext.ports import Listener
from gateway_ext.providers.docker.engine import Container, Image, Taken
from gateway_ext.providers.docker.generation import Generation, Kit, place_of
from gateway_ext.providers.docker.instance import Instance
from gateway_ext.providers.docker.store import Record, Release, Store
from gateway_ext.providers.docker.transport import EngineAway
from gateway_ext.providers.function_log import FunctionLog
from gateway_ext.providers.rollout import Rollout

log = logging.getLogger(__name__)

_USAGE_OVER_S = 0.5


class Function:
    """A deployed function; every change of it is kept, carried out behind, and told."""

    def __init__(self, record: Record, kit: Kit, store: Store, listener: Listener) -> None:
        self.record = record
        self.log = FunctionLog(record.release.deployment.id, record.folder, kit.settings.log_bytes)
        self._kit = kit
        self._store = store
        self._rollout: Rollout[Generation] = Rollout(self, listener, kit.settings.drain_s)
        self._resumed = False  # until then what runs of it is not known
        self._tidying: set[asyncio.Task[None]] = set()

    def tell(self) -> None:
        """Have the listener know that there is such a function."""
        self._rollout.tell()

    async def resume(self, containers: Sequence[Container]) -> None:
        """Go on with what runs of it; what there should be beside is started."""
        running = await self._adopted(containers)
        self._resumed = True
        record = self.record
        serving = record.before if record.before is not None else record.release
        if serving.image is not None:
            adopted = running.get(serving.id, [])
            self._rollout.start_with(self._generation(serving, adopted))
        if record.before is not None or record.release.image is None:
            coming = running.get(record.release.id, [])
            self._rollout.begin(lambda: self._make(record.release, coming))

    def begin(self) -> None:
        """Save what is wanted now, and bring it about; what runs goes on until that is ready."""
        self._resumed = True
        self._store.save(self.record)
        release = self.record.release
        self._rollout.begin(lambda: self._make(release))

    def update(self, release: Release, wanted: int) -> None:
        """Another release of it is wanted; the one that serves does so until that is ready."""
        if not self._resumed:
            serving = self.record.before or self.record.release
            before = serving if serving.image is not None else None
            self.record = replace(self.record, release=release, before=before, wanted=wanted)
            self._store.save(self.record)
            return
        current = self._rollout.current
        before = current.release if current is not None else None
        self.record = replace(self.record, release=release, before=before, wanted=wanted)
        self.begin()

    def scale(self, wanted: int) -> None:
        """So many replicas."""
        self.record = replace(self.record, wanted=wanted)
        self._store.save(self.record)
        self._rollout.resize()

    async def stop(self, *, drain: bool) -> None:
        """End every instance, and remove what they had; with `drain` calls may end before."""
        releases = {one.id: one for one in self.releases}
        try:
            await self._rollout.stop(drain=drain)
        finally:
            self.log.close()
        for release in releases.values():
            await self._tidy(release)

    async def let_go(self) -> None:
        """Its containers go on without this gateway."""
        for task in self._tidying:
            task.cancel()
        try:
            await self._rollout.let_go()
        finally:
            self.log.close()

    async def refresh_secrets(self, name: str) -> None:
        """A secret has another value: the files of all that have it are to say so."""
        failed: list[ProviderFailed] = []
        for release in {one.id: one for one in self.releases}.values():
            if name in release.deployment.secrets:
                try:
                    await self._kit.volumes.fill(release)
                except ProviderFailed as error:
                    failed.append(error)  # the other releases are to have it all the same
        if failed:
            raise failed[0]

    async def status(self, *, usage: bool) -> FunctionStatus:
        """How it is now."""
        return FunctionStatus(
            deployment=self.deployment,
            replicas=self.wanted,
            available_replicas=self._rollout.available,
            created_at=self.record.created_at,
            usage=await self._usage() if usage else None,
            trouble=self._rollout.trouble,
        )

    @property
    def deployment(self) -> Deployment:
        """What is wanted now."""
        return self.record.release.deployment

    @property
    def wanted(self) -> int:
        """So many replicas."""
        return self.record.wanted

    @property
    def secrets(self) -> set[str]:
        """Those that something running, or soon to run, reads."""
        return {name for one in self.releases for name in one.deployment.secrets}

    @property
    def releases(self) -> list[Release]:
        """Those that something runs of, or soon will; some of them twice."""
        return [*self.record.releases, *(one.release for one in self._rollout.present)]

    def say(self, text: str) -> None:
        """A line about how it comes about, in its log."""
        self.log.write(f"{self.deployment.id.name}-deploy", text)

    def followed(self, version: Generation) -> None:
        """What served before is not to come back with the next gateway."""
        if version.release.id == self.record.release.id:
            self.record = replace(self.record, before=None)
            try:
                self._store.save(self.record)
            except OSError as error:  # it is saved with the next change; nobody waits for this
                text = "what served before is started once more by the next gateway"
                log.error("%s: %s: %s", self.deployment.id, text, error)

    def left(self, version: Generation) -> None:
        """What only that version had is removed with it."""
        if version.release.id in {one.id for one in self.releases}:
            return
        task = asyncio.create_task(self._tidy(version.release))
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def _adopted(self, containers: Iterable[Container]) -> Mapping[str, list[Instance]]:
        found: dict[str, list[Instance]] = {one.id: [] for one in self.record.releases}
        try:
            for container in containers:
                instance = await self._claimed(container)
                if instance is not None:
                    found[container.release].append(instance)
        except BaseException:
            for instance in (one for several in found.values() for one in several):
                self._kit.fleet.forget(instance.name)  # with the next look
            raise
        return found

    async def _claimed(self, container: Container) -> Instance | None:
        """None for one that is not to go on: it is nobody's then, and removed."""
        release = next((one for one in self.record.releases if one.id == container.release), None)
        if release is None or not container.running:
            return None
        try:
            return await self._kit.fleet.adopt(container, place_of(release, self._kit, self.log))
        except EngineAway:
            raise
        except ProviderFailed as error:
            log.warning("container %s does not go on: %s", container.name, error)
            return None

    async def _make(self, release: Release, running: Iterable[Instance] = ()) -> Generation:
        if release.image is None:
            self.say(f"image {release.deployment.image} is on its way")
            image = await self._image(release.deployment.image)
            self._kit.check(release.deployment, image)
            release = self._resolved(replace(release, image=image))
        return self._generation(release, running)

    async def _image(self, name: str) -> Image:
        """However often a registry or the Engine fails; BadDeployment where asking is no use."""
        pause_s = self._kit.settings.first_pause_s
        while True:
            try:
                return await self._kit.images.ready(name)
            except ProviderFailed as error:
                self._rollout.hindered(f"{error}; it is tried again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._kit.settings.longest_pause_s)

    def _resolved(self, release: Release) -> Release:
        """Its image has come: that is the one from now on."""
        if self.record.release.id == release.id:
            self.record = replace(self.record, release=release)
            self._store.save(self.record)
        return release

    def _generation(self, release: Release, running: Iterable[Instance] = ()) -> Generation:
        return Generation(release, self._kit, self.log, self._rollout.changed, running)

    async def _tidy(self, release: Release) -> None:
        try:
            await self._kit.volumes.remove(release)
        except ProviderFailed as error:
            log.warning("secrets of %s are removed later: %s", self.deployment.id, error)

    async def _usage(self) -> Usage:
        before = await self._taken()
        await asyncio.sleep(_USAGE_OVER_S)
        after = await self._taken()
        busy = max(0.0, after.cpu_s - before.cpu_s) / _USAGE_OVER_S
        return Usage(round(busy * 1000, 1), after.memory_bytes)

    async def _taken(self) -> Taken:
        names = [one.name for version in self._rollout.versions for one in version.instances]
        each = await asyncio.gather(*(self._kit.engine.taken(name) for name in names))
        return Taken(sum(one.cpu_s for one in each), sum(one.memory_bytes for one in each))
