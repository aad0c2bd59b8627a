"""Python environments of functions: one for each content of requirements.txt, cached.

An environment sees its own packages first, then those of the gateway (torch among them), through a
.pth file with plain paths. A package that the gateway has is not installed again unless another
version is pinned, and pip is not started if no package is missing. A gateway that runs from a
source tree does not offer its own packages. Namespaces share only the environment without packages
of its own: what an installation did is seen by those alone who asked for it.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import sys
import sysconfig
from collections.abc import AsyncIterator, Collection
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from gateway_ext.providers import folder_trees
from gateway_ext.providers.process.build_folders import requirements_of
from gateway_ext.providers.process.environments.environment_build import (
    EnvironmentBuilds,
    Note,
    WantedEnvironment,
)
from gateway_ext.providers.process.process_settings import ProcessProviderSettings
from gateway_ext.providers.process.users.machine_users import MachineUsers

log = logging.getLogger(__name__)

_MADE = ".made"  # a file in an environment that is complete
_BARE_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")


class BuildOfNamespace(NamedTuple):
    """The copied build of a function, whose requirements.txt is meant."""

    namespace: str
    build: Path


class PythonEnvironments:
    """The environments of a provider, in one folder; builds have users of their own if `users`."""

    def __init__(
        self, settings: ProcessProviderSettings, users: MachineUsers | None, mark: str
    ) -> None:
        self._settings = settings
        self._folder = settings.state / "envs"
        self._users = users
        self._builds = EnvironmentBuilds(settings, users, mark)
        self._requested: set[str] = set()  # since the last pruning began
        # Of both only those that somebody has or waits for: names and namespaces come and go.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turns = asyncio.Semaphore(settings.build.at_once)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def name_of(self, namespace: str, requirements: bytes) -> str:
        """The name of the environment for these requirements."""
        missing = self._missing(requirements)
        base = os.path.realpath(self._settings.base_python)
        identity = f"{sys.version} {base} {self._gateway_packages()}\n".encode()
        owner = f"{namespace}\n".encode() if missing else b""
        return hashlib.sha256(identity + owner + missing).hexdigest()[:16]

    async def ready(self, namespace: str, requirements: bytes, note: Note) -> Path:
        """The Python of an environment, which is made if there is none; progress goes to `note`."""
        name = self.name_of(namespace, requirements)
        self._requested.add(name)
        folder = self._folder / name
        async with self._lock(name):
            if not (folder / _MADE).exists():
                async with self._turn(namespace, note):
                    await self._make(folder, requirements, note)
        return folder / "bin" / "python"

    async def prune(self, builds: Collection[BuildOfNamespace]) -> None:
        """Delete environments that none of these builds needs."""
        self._requested.clear()
        used = {
            self.name_of(one.namespace, await asyncio.to_thread(requirements_of, one.build))
            for one in builds
        }
        for folder in list(self._folder.iterdir()):
            if folder.name in used | self._requested:
                continue
            async with self._lock(folder.name):
                await asyncio.to_thread(_remove, folder)

    def remove_unfinished(self) -> None:
        """Delete environments that an earlier gateway did not complete, and end their builds."""
        for folder in self._folder.iterdir():
            owner = folder.lstat().st_uid
            if owner == os.geteuid() and (folder / _MADE).exists():
                continue
            if self._users is not None and self._users.builds.keep(owner):
                self._users.end([owner])
                self._users.builds.give_back(owner)
            _remove(folder)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    @contextlib.asynccontextmanager
    async def _turn(self, namespace: str, note: Note) -> AsyncIterator[None]:
        """Wait until a build of this namespace may run; another's builds take only some turns."""
        most = self._settings.build.at_once_of_one
        own = self._turns_of.setdefault(namespace, asyncio.Semaphore(most))
        if own.locked() or self._turns.locked():
            note("waiting for other builds to end")
        async with own, self._turns:
            yield

    async def _make(self, folder: Path, requirements: bytes, note: Note) -> None:
        missing, shared = self._missing(requirements), tuple(self._gateway_packages())
        wanted = WantedEnvironment(folder, requirements if missing else b"", shared)
        await self._builds.make(wanted, note)
        _mark_as_made(folder)

    def _missing(self, requirements: bytes) -> bytes:
        """The lines that pip must install: a package of the gateway satisfies a bare name."""
        lines = [line.split(b" #")[0].strip() for line in requirements.splitlines()]
        asked = [line for line in lines if line and not line.startswith(b"#")]
        return b"\n".join(line for line in asked if not self._is_met(line))

    def _is_met(self, line: bytes) -> bool:
        if not _BARE_NAME.fullmatch(line):
            return False
        found = distributions(name=line.decode(), path=self._gateway_packages())
        return next(iter(found), None) is not None

    def _gateway_packages(self) -> list[str]:
        """Empty for another Python than the gateway's, as compiled packages would not load."""
        if os.path.realpath(self._settings.base_python) != os.path.realpath(sys.executable):
            return []
        paths = sysconfig.get_paths()
        return list(dict.fromkeys([paths["purelib"], paths["platlib"]]))


def _mark_as_made(folder: Path) -> None:
    """Write the mark anew: the build may have left anything in its place."""
    mark = folder / _MADE
    mark.unlink(missing_ok=True)
    os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644))


def _remove(folder: Path) -> None:
    try:
        folder_trees.remove(folder)
    except OSError as error:
        log.warning("environment %s is removed later: %s", folder.name, error)
