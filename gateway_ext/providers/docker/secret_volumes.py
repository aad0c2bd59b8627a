"""Secrets of functions, in volumes of the Engine.

Volumes are filled through the Engine's API, so that the gateway may run in a container or on
another machine, where a folder of its own could not be mounted. Each release has one volume,
mounted read-only; every user in the container may read its files.
"""

import asyncio
import io
import tarfile
from collections import defaultdict
from collections.abc import Callable, Collection
from secrets import token_hex

from gateway_ext.providers.docker import container_spec
from gateway_ext.providers.docker.container_spec import Release
from gateway_ext.providers.docker.engine import RELEASE, EngineClient

_FILE_MODE = 0o444


class SecretVolumes:
    """Volumes of one gateway; `value` returns the content of a secret."""

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
