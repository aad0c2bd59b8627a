"""Runs functions as processes of this machine, and starts them again after a restart."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import Deployment
from gateway_ext.openfaas import function_options
from gateway_ext.ports import FunctionListener, Injection
from gateway_ext.providers.managed.managed_provider import ManagedProvider
from gateway_ext.providers.process import build_folders, process_table
from gateway_ext.providers.process.build_store import BuildRecord, BuildStore
from gateway_ext.providers.process.child_instance import ChildInstance
from gateway_ext.providers.process.process_function import ProcessFunction
from gateway_ext.providers.process.process_launch import users_refused
from gateway_ext.providers.process.process_settings import ProcessProviderSettings
from gateway_ext.providers.process.process_version import (
    ProcessParts,
    home_folder,
    secrets_folder,
)
from gateway_ext.providers.process.python_environments import PythonEnvironments

log = logging.getLogger(__name__)

_CHECK_MEMORY_EVERY_S = 0.5


class ProcessProvider(ManagedProvider[ProcessFunction, BuildRecord]):
    """Implements `gateway_ext.ports.Provider`."""

    name = "process"

    def __init__(
        self, settings: ProcessProviderSettings, injection: Injection | None = None
    ) -> None:
        self._settings = settings
        self._separate_users = os.geteuid() == 0  # whether every function gets a user of its own
        self._store = BuildStore(settings.state)
        super().__init__(self._store)
        mark = hashlib.sha256(os.fsencode(self._store.folder)).hexdigest()[:12]
        self._parts = ProcessParts(settings, self._store.sockets, injection, mark)
        self._uids_leaving: set[int] = set()
        self._checking_memory: asyncio.Task[None] | None = None
        self._environments: PythonEnvironments

    async def start(self, listener: FunctionListener) -> None:
        """Start all stored functions, after killing what an earlier gateway left."""
        records = await self._opened(listener)
        killed = await asyncio.to_thread(process_table.end_marked, f"{self._parts.mark}/")
        if killed:
            log.warning("%d processes of an earlier gateway were still there: killed", killed)
        await self._settle_users()
        for record in records:
            self._add(await asyncio.to_thread(self._with_user, record)).begin()
        await self._prune()
        self._checking_memory = asyncio.create_task(self._check_memory())

    async def close(self) -> None:
        """Stop all functions; the next start runs them again."""
        if not self._store.lock.ours:
            return  # another gateway uses the state folder and its processes
        if self._checking_memory is not None:
            self._checking_memory.cancel()
            await asyncio.wait([self._checking_memory])
        functions, self._functions = list(self._functions.values()), {}
        await asyncio.gather(*(function.stop(drain=False) for function in functions))
        leaving = list(self._leaving)
        for task in leaving:
            task.cancel()  # ends its wait for calls; its clean-up continues
        if leaving:
            await asyncio.wait(leaving)
        await asyncio.to_thread(process_table.end_marked, f"{self._parts.mark}/")
        self._store.lock.give_back()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept a deployment; its environment and its instances are made in the background."""
        options = function_options.of(deployment)
        async with self._deploying:
            self._check(deployment, update=update)
            present = self._functions.get(deployment.id)
            source = build_folders.find(deployment, self._settings)
            before = present.record if present is not None else await self._new_record(deployment)
            try:
                folder, uid = before.folder, before.uid
                build = await asyncio.to_thread(build_folders.copy, source, folder, uid)
                if present is not None:
                    before = present.record  # it may have been scaled in the meantime
                wanted = max(before.wanted, options.scale_min)
                record = replace(before, deployment=deployment, build=build, wanted=wanted)
                # The old version serves, and reads its secrets, until the new one is ready.
                shown = present.secrets if present is not None else set()
                self._show_secrets(record, shown | set(deployment.secrets))
            except BaseException:
                if present is None:
                    self._store.discard(before.folder)
                raise
            if present is not None:
                present.update(record)
            else:
                self._add(record).begin()

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """Store a value, and write it to the files of all functions that mount the secret."""
        self._secrets.update(namespace, name, value)
        for function in self._using(namespace, name):
            self._show_secrets(function.record, function.secrets)

    async def _settle_users(self) -> None:
        """Find out whether this system lets processes run as other users; containers may not."""
        builder = self._settings.first_uid + self._settings.uids
        if self._separate_users:
            refused = await asyncio.to_thread(users_refused, builder, self._settings)
            if refused:
                log.warning("functions run as this gateway's own user: %s", refused)
                self._separate_users = False
        settings = replace(self._settings, state=self._store.folder)
        user = builder if self._separate_users else None
        self._environments = PythonEnvironments(settings, user, self._parts.mark)

    def _with_user(self, record: BuildRecord) -> BuildRecord:
        """The record with a user, or without, as this gateway's rights allow."""
        if (record.uid is not None) == self._separate_users:
            return record
        given = replace(record, uid=self._free_uid())
        if given.uid is not None:
            for path in (record.folder, *record.folder.rglob("*")):
                os.chown(path, 0, given.uid, follow_symlinks=False)
            os.chown(home_folder(record), given.uid, given.uid)
        return given

    def _add(self, record: BuildRecord) -> ProcessFunction:
        function = ProcessFunction(
            *(record, self._parts, self._store, self._environments, self._listener, self._prune),
            show_secrets=self._show_secrets,
        )
        self._functions[record.deployment.id] = function
        return function

    async def _new_record(self, deployment: Deployment) -> BuildRecord:
        uid = await asyncio.to_thread(self._free_uid)
        folder = self._store.new_folder(deployment.id, uid)
        record = BuildRecord(deployment, folder, folder / "none", datetime.now(UTC), 0, uid)
        home = home_folder(record)
        home.mkdir(mode=0o700)
        if uid is not None:
            os.chown(home, uid, uid)
        return record

    def _free_uid(self) -> int | None:
        if not self._separate_users:
            return None
        taken = {function.record.uid for function in self._functions.values()}
        # Users of another gateway's processes, or of processes that escaped their function's end.
        taken |= process_table.users()
        first = self._settings.first_uid
        for uid in range(first, first + self._settings.uids):
            if uid not in taken and uid not in self._uids_leaving:
                return uid
        raise ProviderFailed("there are more functions than user ids for them")

    def _show_secrets(self, record: BuildRecord, names: Iterable[str]) -> None:
        namespace = record.deployment.id.namespace
        self._secrets.show(namespace, names, secrets_folder(record), record.uid)

    async def _take_down(self, function: ProcessFunction) -> None:
        uid = function.record.uid
        if uid is not None:
            self._uids_leaving.add(uid)
        try:
            await function.stop(drain=True)
        finally:
            if uid is not None:
                await asyncio.to_thread(process_table.end_user, uid, self._parts.mark)
            await asyncio.to_thread(self._store.discard, function.record.folder)
            if uid is not None:
                self._uids_leaving.discard(uid)
        await self._prune()

    async def _prune(self) -> None:
        builds_used = {build for one in self._functions.values() for build in one.builds}
        await self._environments.prune(builds_used)

    async def _check_memory(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_MEMORY_EVERY_S)
            limited = self._limited()
            if limited:
                sessions = await asyncio.to_thread(process_table.sessions)
                for instance in limited:
                    pids = sessions.get(instance.pid, [])
                    usage = await asyncio.to_thread(process_table.usage, pids)
                    instance.enforce_memory_limit(usage)

    def _limited(self) -> list[ChildInstance]:
        instances = [one for function in self._functions.values() for one in function.instances]
        return [instance for instance in instances if instance.memory_bytes is not None]
