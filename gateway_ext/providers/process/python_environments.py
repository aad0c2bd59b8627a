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
import json
import logging
import os
import re
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import distributions
from pathlib import Path
from weakref import WeakValueDictionary

from common.time_limits import time_limit
from gateway_ext.errors import ProviderFailed
from gateway_ext.providers import disk
from gateway_ext.providers.disk import TreeRefused
from gateway_ext.providers.managed.logs import OutputPipe
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.builds import requirements_of
from gateway_ext.providers.process.launch import (
    MARK,
    InstanceProcess,
    LaunchOrders,
    interpreter_folders,
    launch,
)
from gateway_ext.providers.process.settings import ProcessBounds, base_python
from gateway_ext.providers.process.users import MachineUsers
from gateway_ext.settings import GatewaySettings

log = logging.getLogger(__name__)

_MADE = ".made"  # a file in an environment that is complete
_BARE_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")


# A build runs what packages bring with them, so it is as hostile as a function. Root writes into
# its folder only before its first process and after its last one has ended.

Note = Callable[[str], None]

_PROGRAM = Path(__file__).with_name("environment_program.py")
_SCRATCH = "tmp"
_CHECK_EVERY_S = 1.0
# Its folder is measured less often, and for a small share of the time, however many files it has.
_MEASURE_EVERY_S, _MEASURE_SHARE = 5.0, 20
_DRAIN_OUTPUT_S = 0.5
_MOST_OPEN_FILES = 4096


class EnvironmentFailed(ProviderFailed):
    """The environment cannot be made; the text says why, perhaps by the last line of output."""


@dataclass(eq=False)
class PythonEnvironments:
    """The environments of a provider; builds are of the gateway's own user without `users`."""

    settings: GatewaySettings
    bounds: ProcessBounds
    folder: Path
    _: KW_ONLY
    users: MachineUsers | None
    mark: str

    def __post_init__(self) -> None:
        self._python = base_python(self.settings)
        self._requested: set[str] = set()  # since the last pruning began
        # Of both only those that somebody has or waits for: names and namespaces come and go.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turns = asyncio.Semaphore(self.settings.builds_at_once)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def name_of(self, namespace: str, requirements: bytes) -> str:
        missing = self._missing(requirements)
        base = os.path.realpath(self._python)
        identity = f"{sys.version} {base} {self._gateway_packages()}\n".encode()
        owner = f"{namespace}\n".encode() if missing else b""
        return hashlib.sha256(identity + owner + missing).hexdigest()[:16]

    async def ready(self, namespace: str, requirements: bytes, note: Note) -> Path:
        """The Python of an environment, which is made if there is none; progress goes to `note`."""
        name = self.name_of(namespace, requirements)
        self._requested.add(name)
        folder = self.folder / name
        async with self._lock(name):
            if not (folder / _MADE).exists():
                async with self._turn(namespace, note):
                    await self._make(folder, requirements, note)
        return folder / "bin" / "python"

    async def prune(self, builds: Collection[tuple[str, Path]]) -> None:
        """Delete environments that none of these builds, each with its namespace, needs."""
        self._requested.clear()
        used = {
            self.name_of(namespace, await asyncio.to_thread(requirements_of, build))
            for namespace, build in builds
        }
        for folder in list(self.folder.iterdir()):
            if folder.name in used | self._requested:
                continue
            async with self._lock(folder.name):
                await asyncio.to_thread(_remove, folder)

    def remove_unfinished(self) -> None:
        """Delete environments that an earlier gateway did not complete, and end their builds."""
        for folder in self.folder.iterdir():
            owner = folder.lstat().st_uid
            if owner == os.geteuid() and (folder / _MADE).exists():
                continue
            if self.users is not None and self.users.builds.keep(owner):
                self.users.end([owner])
                self.users.builds.give_back(owner)
            _remove(folder)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    @contextlib.asynccontextmanager
    async def _turn(self, namespace: str, note: Note) -> AsyncIterator[None]:
        """Wait until a build of this namespace may run; another's builds take only some turns."""
        most = (self.settings.builds_at_once + 1) // 2
        own = self._turns_of.setdefault(namespace, asyncio.Semaphore(most))
        if own.locked() or self._turns.locked():
            note("waiting for other builds to end")
        async with own, self._turns:
            yield

    async def _make(self, folder: Path, requirements: bytes, note: Note) -> None:
        await self._fill(folder, requirements if self._missing(requirements) else b"", note)
        mark = folder / _MADE
        mark.unlink(missing_ok=True)  # the build may have left anything in its place
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644))

    def _missing(self, requirements: bytes) -> bytes:
        """A package of the gateway satisfies a bare name."""
        lines = [line.split(b" #")[0].strip() for line in requirements.splitlines()]
        asked = [line for line in lines if line and not line.startswith(b"#")]
        ours = self._gateway_packages()
        return b"\n".join(
            line for line in asked if not (_BARE_NAME.fullmatch(line) and _has(line.decode(), ours))
        )

    def _gateway_packages(self) -> list[str]:
        """Empty for another Python than the gateway's, as compiled packages would not load."""
        if os.path.realpath(self._python) != os.path.realpath(sys.executable):
            return []
        paths = sysconfig.get_paths()
        return list(dict.fromkeys([paths["purelib"], paths["platlib"]]))

    # -- one build ------------------------------------------------------------------------------

    async def _fill(self, folder: Path, requirements: bytes, note: Note) -> None:
        """Fill the environment's folder, or leave nothing. It is root's afterwards."""
        await asyncio.to_thread(disk.remove, folder)
        uid = None if self.users is None else await asyncio.to_thread(self.users.builds.take)
        try:
            await asyncio.to_thread(_prepare, folder, requirements, uid)
            if requirements:
                note("installing what requirements.txt asks for")
            orders = self._orders(folder, uid, install=bool(requirements))
            await self._run(folder, uid, orders, note)
            await asyncio.to_thread(self._close, folder, uid)
        except BaseException:
            await asyncio.to_thread(disk.remove, folder)
            raise
        finally:
            if uid is not None and self.users is not None:
                self.users.builds.give_back(uid)

    async def _run(self, folder: Path, uid: int | None, orders: LaunchOrders, note: Note) -> None:
        last = ""

        def store(lines: list[str]) -> None:
            nonlocal last
            for line in filter(None, map(str.rstrip, lines)):
                note(line)
                last = line

        started = InstanceProcess.started(launch(orders))
        pipe = OutputPipe(started.output, store)
        try:
            async with time_limit(self.settings.build_timeout_s):
                await self._watch(folder, uid, started)
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"its environment takes longer than {self.settings.build_timeout_s:g} s"
            ) from error
        finally:
            try:
                if not started.exited.done():
                    os.killpg(started.pid, signal.SIGKILL)
                status = await asyncio.shield(started.exited)
                await asyncio.to_thread(self._end_all, folder, uid)
                with contextlib.suppress(TimeoutError):  # without users something may be left
                    await asyncio.wait_for(pipe.ended, _DRAIN_OUTPUT_S)
            finally:
                pipe.close()
        if status:
            raise EnvironmentFailed(f"its environment cannot be made ({status}): {last}")

    async def _watch(self, folder: Path, uid: int | None, started: InstanceProcess) -> None:
        """EnvironmentFailed if it uses too much."""
        now_s = asyncio.get_running_loop().time
        measured_s = now_s() + _MEASURE_EVERY_S
        while not started.exited.done():
            await asyncio.wait([started.exited], timeout=_CHECK_EVERY_S)
            used = await asyncio.to_thread(_memory_bytes, uid, started.pid)
            _check_amount("memory", used, self.settings.build_memory_bytes)
            begun_s = now_s()
            if begun_s >= measured_s:
                await asyncio.to_thread(self._check_size, folder)
                took_s = now_s() - begun_s
                measured_s = now_s() + max(_MEASURE_EVERY_S, took_s * _MEASURE_SHARE)

    def _end_all(self, folder: Path, uid: int | None) -> None:
        """Kill every process of the build, also those that left its session and environment."""
        if uid is not None and self.users is not None:
            self.users.end([uid])
        else:
            processes.end_marked(self._mark_of(folder))

    def _check_size(self, folder: Path) -> None:
        try:
            size = disk.size_bytes(folder)
        except TreeRefused as error:
            raise EnvironmentFailed(f"its environment cannot be used: {error}") from error
        _check_amount("disk", size, self.settings.build_disk_bytes)

    def _close(self, folder: Path, uid: int | None) -> None:
        """Leave the environment as root's own, for all to read."""
        disk.remove(folder / _SCRATCH)
        self._check_size(folder)
        if uid is None:
            return
        try:
            disk.close_for_others(folder, made_by=uid)
        except TreeRefused as error:
            raise EnvironmentFailed(f"its environment cannot be used: {error}") from error

    def _orders(self, folder: Path, uid: int | None, *, install: bool) -> LaunchOrders:
        scratch, shared = str(folder / _SCRATCH), self._gateway_packages()
        own_pip = install and not _has("pip", shared)
        orders = {"folder": str(folder), "shared": shared, "install": install, "own_pip": own_pip}
        program = _PROGRAM.read_text(encoding="utf-8")
        visible = [*interpreter_folders(self._python), *self.settings.visible, str(folder)]
        return LaunchOrders(
            command=[str(self._python), "-I", "-c", program, json.dumps(orders)],
            environment={
                **self.bounds.pip_environment,
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "HOME": scratch,
                "TMPDIR": scratch,
                MARK: self._mark_of(folder),
            },
            cwd=str(folder),
            uid=uid,
            visible=visible,
            scratch=scratch,
            network=self.settings.build_network,
            background=True,
            limits=self._resource_limits(uid),
        )

    def _resource_limits(self, uid: int | None) -> dict[str, int]:
        limits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_DATA": self.settings.build_memory_bytes,
            "RLIMIT_FSIZE": self.settings.build_disk_bytes,
            "RLIMIT_NOFILE": _MOST_OPEN_FILES,
        }
        if uid is not None:  # else all processes of the gateway's user would count
            limits["RLIMIT_NPROC"] = self.bounds.build_processes
        return limits

    def _mark_of(self, folder: Path) -> str:
        return f"{self.mark}/env-{folder.name}"


def _prepare(folder: Path, requirements: bytes, uid: int | None) -> None:
    """Make the folder, before anybody else can reach it."""
    folder.mkdir(mode=0o700)
    scratch, asked = folder / _SCRATCH, folder / "requirements.txt"
    scratch.mkdir()
    scratch.chmod(0o711)  # it takes the place of /tmp, in which others are looked up
    asked.write_bytes(requirements)
    if uid is not None:
        for path in (scratch, asked, folder):
            os.chown(path, uid, uid)


def _has(package: str, folders: Sequence[str]) -> bool:
    return next(iter(distributions(name=package, path=list(folders))), None) is not None


def _memory_bytes(uid: int | None, leader: int) -> int:
    pids = processes.sessions().get(leader) if uid is None else processes.by_user().get(uid)
    return processes.usage(pids or []).own_bytes


def _check_amount(what: str, used: int, limit: int) -> None:
    if used > limit:
        raise EnvironmentFailed(
            f"its environment takes {used >> 20} MiB of {what}, {limit >> 20} MiB are the most"
        )


def _remove(folder: Path) -> None:
    try:
        disk.remove(folder)
    except OSError as error:
        log.warning("environment %s is removed later: %s", folder.name, error)
