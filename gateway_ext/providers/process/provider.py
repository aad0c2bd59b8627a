"""Runs functions as processes of this machine, and starts them again after a restart."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from common.tasks import BackgroundTasks
from gateway_ext.model import Deployment
from gateway_ext.openfaas import function_options
from gateway_ext.ports import FunctionListener, Injection
from gateway_ext.providers import disk
from gateway_ext.providers.managed.provider import ManagedProvider
from gateway_ext.providers.process import builds, processes
from gateway_ext.providers.process.builds import BuildRecord, BuildStore
from gateway_ext.providers.process.function import (
    ProcessFunction,
    ProcessParts,
    home_folder,
    secrets_folder,
)
from gateway_ext.providers.process.launch import users_refused
from gateway_ext.providers.process.python_environments import PythonEnvironments
from gateway_ext.providers.process.settings import ProcessBounds, base_python, check_settings
from gateway_ext.providers.process.template import enforce_bounds
from gateway_ext.providers.process.users import MachineUsers
from gateway_ext.settings import GatewaySettings

log = logging.getLogger(__name__)

_CHECK_MEMORY_EVERY_S = 0.5


class ProcessProvider(ManagedProvider[ProcessFunction, BuildRecord]):
    """Implements `gateway_ext.ports.Provider`."""

    name = "process"
    _store: BuildStore

    def __init__(
        self, settings: GatewaySettings, bounds: ProcessBounds, injection: Injection | None = None
    ) -> None:
        check_settings(settings)
        self._settings = settings
        self._bounds = bounds
        super().__init__(BuildStore(Path(settings.state_dir) / "functions"))
        mark = hashlib.sha256(os.fsencode(self._store.folder)).hexdigest()[:12]
        self._parts = ProcessParts(settings, bounds, self._store.sockets, injection, mark)
        self._users: MachineUsers | None = None  # without root's rights there are none
        self._kept_users: set[int] = set()  # those of records whose functions are not started yet
        self._background = BackgroundTasks(log, "checking memory")
        self._pruning = asyncio.Lock()
        self._environments: PythonEnvironments

    async def start(self, listener: FunctionListener) -> None:
        """Start all stored functions, after killing what an earlier gateway left."""
        records = await self._opened(listener)
        killed = await asyncio.to_thread(processes.end_marked, f"{self._parts.mark}/")
        if killed:
            log.warning("%d processes of an earlier gateway were still there: killed", killed)
        await asyncio.to_thread(self._settle_users, records)
        self._environments = PythonEnvironments(
            *(self._settings, self._bounds, self._store.folder / "envs"),
            users=self._users,
            mark=self._parts.mark,
        )
        await asyncio.to_thread(self._environments.remove_unfinished)
        for record in records:
            self._add(await asyncio.to_thread(self._with_user, record)).begin()
        await self._prune()
        self._background.start(self._check_memory())

    async def close(self) -> None:
        """Stop all functions; the next start runs them again."""
        if not self._store.is_ours:
            return  # another gateway uses the state folder and its processes
        await self._background.close()
        leaving = dict(self._leaving)
        for function in leaving.values():
            function.hurry()
        await asyncio.gather(*(function.stop(drain=False) for function in self._functions.values()))
        if leaving:
            await asyncio.wait(list(leaving))
        self._functions = {}  # only now: what leaves prunes environments that these do not need
        try:
            await asyncio.to_thread(processes.end_marked, f"{self._parts.mark}/")
            if self._users is not None:
                await asyncio.to_thread(self._users.close)
        finally:
            self._store.give_back()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept a deployment; its environment and its instances are made in the background."""
        options = function_options.of(deployment)
        async with self._deploying:
            self._check(deployment, update=update)
            present = self._functions.get(deployment.id)
            source = await asyncio.to_thread(builds.find, deployment, self._settings)
            before = present.record if present is not None else await self._new_record(deployment)
            try:
                folder, uid = before.folder, before.uid
                most_bytes = self._settings.build_disk_bytes
                build = await asyncio.to_thread(builds.copy, source, folder, uid, most_bytes)
                if present is not None:
                    before = present.record  # it may have been scaled in the meantime
                wanted = max(before.wanted, options.scale_min)
                record = replace(before, deployment=deployment, build=build.name, wanted=wanted)
                # The old version serves, and reads its secrets, until the new one is ready.
                shown = present.secrets if present is not None else set()
                self._show_secrets(record, shown | set(deployment.secrets))
            except BaseException:
                if present is None:
                    self._store.discard(before.folder)
                    self._give_back(before.uid)
                raise
            if present is not None:
                present.update(record)
            else:
                self._add(record).begin()

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """Store a value, and write it to the files of all functions that mount the secret."""
        self._secrets.put(namespace, name, value, new=False)
        for function in self._using(namespace, name):
            self._show_secrets(function.record, function.secrets)
            function.renew_templates(f"the secret {name} has changed")

    def _settle_users(self, records: Iterable[BuildRecord]) -> None:
        """Find out whether processes may run as other users; end what an earlier gateway left."""
        if os.geteuid() != 0:
            return
        users = MachineUsers.of(self._bounds, self._store.folder)
        probe = users.functions.take()
        refused = users_refused(probe, base_python(self._settings))
        users.functions.give_back(probe)
        if refused:
            log.warning("functions and builds run as this gateway's own user: %s", refused)
            users.close()
            return
        self._users = users
        left = {uid for uid in self._store.left_users if users.functions.keep(uid)}
        users.end(left)
        self._kept_users = left & {record.uid for record in records if record.uid is not None}
        for uid in left - self._kept_users:
            users.functions.give_back(uid)

    def _with_user(self, record: BuildRecord) -> BuildRecord:
        """The record with a user, or without, as this gateway's rights allow."""
        if self._users is None:
            return replace(record, uid=None)
        if record.uid is not None and record.uid in self._kept_users:
            self._kept_users.remove(record.uid)  # a second record of this user gets another one
            return record
        given = replace(record, uid=self._users.functions.take())
        # What its processes wrote is theirs, whoever they were, and must not become another's.
        disk.remove(home_folder(record))
        disk.give_to(record.folder, 0, given.uid or 0)
        _make_home(given)
        return given

    def _add(self, record: BuildRecord) -> ProcessFunction:
        function = ProcessFunction(
            *(record, self._parts, self._store, self._environments, self._listener, self._prune),
            show_secrets=self._show_secrets,
        )
        self._functions[record.deployment.id] = function
        return function

    async def _new_record(self, deployment: Deployment) -> BuildRecord:
        users = self._users
        uid = None if users is None else await asyncio.to_thread(users.functions.take)
        try:
            folder = self._store.new_folder(deployment.id, uid)
            record = BuildRecord(deployment, folder, "none", datetime.now(UTC), 0, uid)
            _make_home(record)
        except BaseException:
            self._give_back(uid)
            raise
        return record

    def _give_back(self, uid: int | None) -> None:
        if uid is not None and self._users is not None:
            self._users.functions.give_back(uid)

    def _show_secrets(self, record: BuildRecord, names: Iterable[str]) -> None:
        namespace = record.deployment.id.namespace
        self._secrets.show(namespace, names, secrets_folder(record), record.uid)

    async def _take_down(self, function: ProcessFunction) -> None:
        uid = function.record.uid
        try:
            await function.stop(drain=True)
        finally:
            if uid is not None and self._users is not None:
                await asyncio.to_thread(self._users.end, [uid])
            await asyncio.to_thread(self._store.discard, function.record.folder)
            self._give_back(uid)
        await self._prune()

    async def _prune(self) -> None:
        # One after the other: each forgets what was requested before it began, which an earlier
        # one that still deletes must not, as it knows only the builds of its own beginning.
        async with self._pruning:
            await self._environments.prune(
                {
                    (id_.namespace, build)
                    for id_, function in self._functions.items()
                    for build in function.builds
                }
            )

    async def _check_memory(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(_CHECK_MEMORY_EVERY_S)
            try:
                await self._check_memory_once()
                failing = False
            except OSError as error:  # such as too many open files, which passes
                if not failing:
                    log.error("the memory of functions cannot be checked now: %s", error)
                failing = True

    async def _check_memory_once(self) -> None:
        functions = list(self._functions.values())
        limited = [one for one in functions if one.memory_bytes is not None and one.instances]
        templates = [template for function in functions for template in function.templates]
        if limited or templates:
            await self._enforce_memory_limits(functions)
        enforce_bounds(
            templates, most_bytes=self._settings.template_bytes, idle_s=self._bounds.template_idle_s
        )

    async def _enforce_memory_limits(self, functions: Iterable[ProcessFunction]) -> None:
        # Users first: a process that begins in between is missing there, not among the sessions.
        users = await asyncio.to_thread(processes.by_user) if self._users is not None else {}
        sessions = await asyncio.to_thread(processes.sessions)
        inside = {pid for leader in self._parts.leaders for pid in sessions.get(leader, [])}
        for function in functions:
            for template, _ in function.templates:
                template_usage = await asyncio.to_thread(template.usage, sessions)
                template.enforce(function.memory_bytes, template_usage)
            if function.memory_bytes is None:
                continue
            for instance in function.instances:
                pids = sessions.get(instance.pid, [])
                instance.enforce_memory_limit(await asyncio.to_thread(processes.usage, pids))
            uid = function.record.uid
            outside = set(users.get(uid, [])) - inside if uid is not None else set()
            used = await asyncio.to_thread(processes.usage, outside)
            function.enforce_memory_limit_outside(outside, used.own_bytes)


def _make_home(record: BuildRecord) -> None:
    home = home_folder(record)
    home.mkdir(mode=0o700)
    if record.uid is not None:
        os.chown(home, record.uid, record.uid)
