"""One build of an environment: a user of its own, limits, and an end that leaves nothing running.

A build runs what packages bring with them, so it is as hostile as a function. Root writes into its
folder only before its first process and after its last one has ended.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from common.time_limits import time_limit
from gateway_ext.errors import ProviderFailed
from gateway_ext.providers import folder_trees
from gateway_ext.providers.folder_trees import TreeRefused
from gateway_ext.providers.managed.logs.output_pipe import OutputPipe
from gateway_ext.providers.process import process_table
from gateway_ext.providers.process.instance_process import StartedProcess
from gateway_ext.providers.process.process_launch import (
    MARK,
    LaunchOrders,
    interpreter_folders,
    launch,
)
from gateway_ext.providers.process.process_settings import ProcessProviderSettings
from gateway_ext.providers.process.users.machine_users import MachineUsers

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


@dataclass(frozen=True, slots=True)
class WantedEnvironment:
    """What a build makes: `shared` are folders of packages that the environment sees, too."""

    folder: Path
    requirements: bytes
    shared: tuple[str, ...]


class EnvironmentBuilds:
    """Makes environments; without `users` as the gateway's own user."""

    def __init__(
        self, settings: ProcessProviderSettings, users: MachineUsers | None, mark: str
    ) -> None:
        self._settings = settings
        self._limits = settings.build
        self._users = users
        self._mark = mark

    async def make(self, wanted: WantedEnvironment, note: Note) -> None:
        """Fill the environment's folder, or leave nothing. It is root's afterwards."""
        await asyncio.to_thread(folder_trees.remove, wanted.folder)
        uid = None if self._users is None else await asyncio.to_thread(self._users.builds.take)
        try:
            await asyncio.to_thread(_prepare, wanted, uid)
            await self._run(wanted, uid, note)
            await asyncio.to_thread(self._close, wanted.folder, uid)
        except BaseException:
            await asyncio.to_thread(folder_trees.remove, wanted.folder)
            raise
        finally:
            if uid is not None and self._users is not None:
                self._users.builds.give_back(uid)

    async def _run(self, wanted: WantedEnvironment, uid: int | None, note: Note) -> None:
        last = ""

        def store(lines: list[str]) -> None:
            nonlocal last
            for line in filter(None, map(str.rstrip, lines)):
                note(line)
                last = line

        if wanted.requirements:
            note("installing what requirements.txt asks for")
        started = StartedProcess(launch(self._orders(wanted, uid)))
        pipe = OutputPipe(started.output, store)
        try:
            async with time_limit(self._limits.timeout_s):
                await self._watch(wanted, uid, started)
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"its environment takes longer than {self._limits.timeout_s:g} s"
            ) from error
        finally:
            try:
                if not started.exited.done():
                    os.killpg(started.pid, signal.SIGKILL)
                status = await asyncio.shield(started.exited)
                await asyncio.to_thread(self._end_all, wanted, uid)
                with contextlib.suppress(TimeoutError):  # without users something may be left
                    await asyncio.wait_for(pipe.ended, _DRAIN_OUTPUT_S)
            finally:
                pipe.close()
        if status:
            raise EnvironmentFailed(f"its environment cannot be made ({status}): {last}")

    async def _watch(
        self, wanted: WantedEnvironment, uid: int | None, started: StartedProcess
    ) -> None:
        """Wait for the end of the program; EnvironmentFailed if it uses too much."""
        now_s = asyncio.get_running_loop().time
        measured_s = now_s() + _MEASURE_EVERY_S
        while not started.exited.done():
            await asyncio.wait([started.exited], timeout=_CHECK_EVERY_S)
            used = await asyncio.to_thread(_memory_bytes, uid, started.pid)
            _check_amount("memory", used, self._limits.memory_bytes)
            begun_s = now_s()
            if begun_s >= measured_s:
                await asyncio.to_thread(self._check_size, wanted.folder)
                took_s = now_s() - begun_s
                measured_s = now_s() + max(_MEASURE_EVERY_S, took_s * _MEASURE_SHARE)

    def _end_all(self, wanted: WantedEnvironment, uid: int | None) -> None:
        """Kill every process of the build, also those that left its session and environment."""
        if uid is not None and self._users is not None:
            self._users.end([uid])
        else:
            process_table.end_marked(self._mark_of(wanted))

    def _check_size(self, folder: Path) -> None:
        try:
            size = folder_trees.size_bytes(folder)
        except TreeRefused as error:
            raise EnvironmentFailed(f"its environment cannot be used: {error}") from error
        _check_amount("disk", size, self._limits.disk_bytes)

    def _close(self, folder: Path, uid: int | None) -> None:
        """Leave the environment as root's own, for all to read."""
        folder_trees.remove(folder / _SCRATCH)
        self._check_size(folder)
        if uid is None:
            return
        try:
            folder_trees.close_for_others(folder, made_by=uid)
        except TreeRefused as error:
            raise EnvironmentFailed(f"its environment cannot be used: {error}") from error

    def _orders(self, wanted: WantedEnvironment, uid: int | None) -> LaunchOrders:
        settings, folder = self._settings, str(wanted.folder)
        scratch = str(wanted.folder / _SCRATCH)
        orders = {
            "folder": folder,
            "shared": wanted.shared,
            "install": bool(wanted.requirements),
            "own_pip": bool(wanted.requirements) and not _has_pip(wanted.shared),
        }
        program = _PROGRAM.read_text(encoding="utf-8")
        visible = [*interpreter_folders(settings.base_python), *map(str, settings.visible), folder]
        return LaunchOrders(
            command=[str(settings.base_python), "-I", "-c", program, json.dumps(orders)],
            environment={
                **settings.pip_environment,
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "HOME": scratch,
                "TMPDIR": scratch,
                MARK: self._mark_of(wanted),
            },
            cwd=folder,
            uid=uid,
            visible=visible,
            scratch=scratch,
            network=self._limits.network,
            background=True,
            limits=self._resource_limits(uid),
        )

    def _resource_limits(self, uid: int | None) -> dict[str, int]:
        found = {
            "RLIMIT_CORE": 0,
            "RLIMIT_DATA": self._limits.memory_bytes,
            "RLIMIT_FSIZE": self._limits.disk_bytes,
            "RLIMIT_NOFILE": _MOST_OPEN_FILES,
        }
        if uid is not None:  # else all processes of the gateway's user would count
            found["RLIMIT_NPROC"] = self._limits.processes
        return found

    def _mark_of(self, wanted: WantedEnvironment) -> str:
        return f"{self._mark}/env-{wanted.folder.name}"


def _prepare(wanted: WantedEnvironment, uid: int | None) -> None:
    """Make the folder, before anybody else can reach it."""
    wanted.folder.mkdir(mode=0o700)
    scratch, asked = wanted.folder / _SCRATCH, wanted.folder / "requirements.txt"
    scratch.mkdir()
    scratch.chmod(0o711)  # it takes the place of /tmp, in which others are looked up
    asked.write_bytes(wanted.requirements)
    if uid is not None:
        for path in (scratch, asked, wanted.folder):
            os.chown(path, uid, uid)


def _has_pip(folders: Sequence[str]) -> bool:
    return next(iter(distributions(name="pip", path=list(folders))), None) is not None


def _memory_bytes(uid: int | None, leader: int) -> int:
    found = (
        process_table.sessions().get(leader) if uid is None else process_table.by_user().get(uid)
    )
    return process_table.usage(found or []).own_bytes


def _check_amount(what: str, used: int, limit: int) -> None:
    if used > limit:
        raise EnvironmentFailed(
            f"its environment takes {used >> 20} MiB of {what}, {limit >> 20} MiB are the most"
        )
