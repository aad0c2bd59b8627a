"""Secrets of functions, in volumes of the Engine.

A volume and not a folder of the gateway's: it is filled through the Engine's own API, so that it
makes no difference where the gateway runs, in a container or on another machine. One for each
release, mounted read-only; its files may be read by whatever user the image has.
"""

import asyncio
import io
import tarfile
from collections import defaultdict
from collections.abc import Callable, Collection
from secrets import token_hex

from gateway_ext.model import FunctionId
from gateway_ext.providers.docker import spec
from gateway_ext.providers.docker.engine import RELEASE, Engine
from gateway_ext.providers.docker.store import Release

_FILE_MODE = 0o444


class Volumes:
    """Those of one gateway; `value` is what is in a secret."""

    def __init__(self, engine: Engine, name: str, value: Callable[[str, str], bytes]) -> None:
        self._engine = engine
        self._name = name
        self._value = value
        self._filled: set[str] = set()
        self._filling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._fillers: set[str] = set()

    async def ready(self, release: Release) -> str:
        """The volume with a release's secrets; empty where it has none."""
        if not release.deployment.secrets:
            return ""
        name = self._of(release)
        async with self._filling[release.id]:
            if release.id not in self._filled or not await self._engine.has_volume(name):
                await self._write(release)
        return name

    async def fill(self, release: Release) -> None:
        """Have its files be what its secrets are now."""
        if release.image is None or not release.deployment.secrets:
            return
        async with self._filling[release.id]:  # or an older value might be written last
            await self._write(release)

    def fills(self, container: str) -> bool:
        """Whether a volume is being written through this container."""
        return container in self._fillers

    async def remove(self, release: Release) -> None:
        """Once no container has it."""
        self._filled.discard(release.id)
        self._filling.pop(release.id, None)
        if release.deployment.secrets:
            await self._engine.remove_volume(self._of(release))

    async def prune(self, releases: Callable[[], Collection[str]]) -> None:
        """Removes those of releases that are not known; they are known before their volumes."""
        present = await self._engine.volumes()
        known = releases()
        for name, labels in present.items():
            if labels.get(RELEASE, "") not in known:
                await self._engine.remove_volume(name)

    async def _write(self, release: Release) -> None:
        assert release.image is not None, "asked only then"
        self._filled.discard(release.id)  # should this fail, the next container's start does it
        volume, labels = self._of(release), {**self._engine.labels, RELEASE: release.id}
        await self._engine.make_volume(volume, labels)
        filler = f"{self._name}-filler-{token_hex(4)}"
        self._fillers.add(filler)
        try:
            await self._engine.create(filler, spec.filler(release.image.id, volume, labels))
            try:
                await self._engine.put(filler, spec.SECRETS, self._archive(release))
            finally:
                await self._engine.remove(filler)
        finally:
            self._fillers.discard(filler)
        self._filled.add(release.id)

    def _of(self, release: Release) -> str:
        return f"{self._name}-secrets-{release.id}"

    def _archive(self, release: Release) -> bytes:
        function: FunctionId = release.deployment.id
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name in release.deployment.secrets:
                value = self._value(function.namespace, name)
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(value), _FILE_MODE
                tar.addfile(entry, io.BytesIO(value))
        return packed.getvalue()
