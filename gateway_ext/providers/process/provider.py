"""Runs functions as processes of this machine, and brings them back after a restart."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from gateway_ext import wishes
from gateway_ext.errors import (
    ProviderFailed,
    UnknownFunction,
)
from gateway_ext.model import (
    Deployment,
    FunctionId,
)
from gateway_ext.ports import Injection, Listener
from gateway_ext.providers.kept import KeptFunctions
from gateway_ext.providers.process import builds, processes
from gateway_ext.providers.process.environments import Environments
from gateway_ext.providers.process.function import Function
from gateway_ext.providers.process.generation import Kit, home_folder, secrets_folder
from gateway_ext.providers.process.instance import Instance
from gateway_ext.providers.process.launching import users_refused
from gateway_ext.providers.process.settings import ProcessSettings
from gateway_ext.providers.process.store import Record, Store

log = logging.getLogger(__name__)

_WATCH_S = 0.5


class ProcessProvider(KeptFunctions[Function]):
    """Implements `gateway_ext.ports.Provider`."""

    name = "process"

    def __init__(self, settings: ProcessSettings, injection: Injection | None = None) -> None:
        self._settings = settings
        self._users = os.geteuid() == 0  # whether functions get users of their own
        self._store = Store(settings.state)
        super().__init__(self._store.folder)
        mark = hashlib.sha256(os.fsencode(self._store.folder)).hexdigest()[:12]
        self._kit = Kit(settings, self._store.sockets, injection, mark)
        self._leaving: set[asyncio.Task[None]] = set()
        self._uids_leaving: set[int] = set()
        self._deploying = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._listener: Listener
        self._environments: Environments

    async def start(self, listener: Listener) -> None:
        """Bring back what was deployed."""
        self._listener = listener
        records = await asyncio.to_thread(self._store.open)
        killed = await asyncio.to_thread(processes.end_marked, f"{self._kit.mark}/")
        if killed:
            log.warning("%d processes of an earlier gateway were still there: killed", killed)
        self._namespaces.open()
        await self._settle_users()
        for record in records:
            self._add(await asyncio.to_thread(self._with_user, record)).begin()
        await self._prune()
        self._watching = asyncio.create_task(self._watch_memory())

    async def close(self) -> None:
        """Stop everything; it comes back with the next start."""
        if not self._store.lock.ours:
            return  # what runs there is another gateway's
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        functions, self._functions = list(self._functions.values()), {}
        await asyncio.gather(*(function.stop(drain=False) for function in functions))
        for task in self._leaving:
            task.cancel()  # it waits no longer for calls, and goes on
        if self._leaving:
            await asyncio.wait(self._leaving)
        await asyncio.to_thread(processes.end_marked, f"{self._kit.mark}/")
        self._store.lock.give_back()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept it; its environment and its instances are made behind."""
        wished = wishes.of(deployment)
        async with self._deploying:
            self._namespaces.check(deployment.id.namespace)
            present = self._functions.get(deployment.id)
            if present is None and update:
                raise UnknownFunction(deployment.id)
            self._check_secrets(deployment)
            source = builds.find(deployment, self._settings)
            before = present.record if present is not None else await self._new_record(deployment)
            try:
                build = await asyncio.to_thread(builds.copy, source, before.folder, before.uid)
                if present is not None:
                    before = present.record  # it may have been scaled meanwhile
                wanted = max(before.wanted, wished.scale_min)
                record = replace(before, deployment=deployment, build=build, wanted=wanted)
                # The old version serves until the new one is ready, and so long has what it had.
                had = present.secrets if present is not None else set()
                self._show_secrets(record, had | set(deployment.secrets))
            except BaseException:
                if present is None:
                    self._store.discard(before.folder)
                raise
            if present is not None:
                present.update(record)
            else:
                self._add(record).begin()

    async def remove(self, function: FunctionId) -> None:
        """Forget it at once; its instances end behind, when their calls have."""
        async with self._deploying:
            found = self._functions.pop(function, None)
            if found is None:
                raise UnknownFunction(function)
            self._store.forget(found.record)
            self._listener.function_gone(function)
        task = asyncio.create_task(self._take_down(found))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """Functions that have it mounted see the new value in their file."""
        self._secrets.update(namespace, name, value)
        for function in self._using(namespace, name):
            self._show_secrets(function.record, function.secrets)

    async def _settle_users(self) -> None:
        """Finds out whether this system allows users of their own, in a container for example."""
        builder = self._settings.first_uid + self._settings.uids
        if self._users:
            refused = await asyncio.to_thread(users_refused, builder, self._settings)
            if refused:
                log.warning("functions run as this gateway's own user: %s", refused)
                self._users = False
        settings = replace(self._settings, state=self._store.folder)
        user = builder if self._users else None
        self._environments = Environments(settings, user, self._kit.mark)

    def _with_user(self, record: Record) -> Record:
        """A gateway that was not root before, or is not now, left it otherwise."""
        if (record.uid is not None) == self._users:
            return record
        given = replace(record, uid=self._free_uid())
        if given.uid is not None:
            for path in (record.folder, *record.folder.rglob("*")):
                os.chown(path, 0, given.uid, follow_symlinks=False)
            os.chown(home_folder(record), given.uid, given.uid)
        return given

    def _add(self, record: Record) -> Function:
        function = Function(
            *(record, self._kit, self._store, self._environments, self._listener, self._prune),
            show_secrets=self._show_secrets,
        )
        self._functions[record.deployment.id] = function
        return function

    async def _new_record(self, deployment: Deployment) -> Record:
        uid = await asyncio.to_thread(self._free_uid)
        folder = self._store.new_folder(deployment.id, uid)
        record = Record(deployment, folder, folder / "none", datetime.now(UTC), 0, uid)
        home = home_folder(record)
        home.mkdir(mode=0o700)
        if uid is not None:
            os.chown(home, uid, uid)
        return record

    def _free_uid(self) -> int | None:
        if not self._users:
            return None
        taken = {function.record.uid for function in self._functions.values()}
        taken |= processes.users()  # another gateway's, or of a function that hides from its end
        first = self._settings.first_uid
        for uid in range(first, first + self._settings.uids):
            if uid not in taken and uid not in self._uids_leaving:
                return uid
        raise ProviderFailed("there are more functions than user ids for them")

    def _show_secrets(self, record: Record, names: Iterable[str]) -> None:
        namespace = record.deployment.id.namespace
        self._secrets.show(namespace, names, secrets_folder(record), record.uid)

    async def _take_down(self, function: Function) -> None:
        uid = function.record.uid
        if uid is not None:
            self._uids_leaving.add(uid)
        try:
            await function.stop(drain=True)
        finally:
            if uid is not None:
                await asyncio.to_thread(processes.end_user, uid, self._kit.mark)
            await asyncio.to_thread(self._store.discard, function.record.folder)
            if uid is not None:
                self._uids_leaving.discard(uid)
        await self._prune()

    async def _prune(self) -> None:
        builds_used = {build for one in self._functions.values() for build in one.builds}
        await self._environments.prune(builds_used)

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            limited = self._limited()
            if limited:
                sessions = await asyncio.to_thread(processes.sessions)
                for instance in limited:
                    pids = sessions.get(instance.pid, [])
                    instance.hold_to_memory(await asyncio.to_thread(processes.taken, pids))

    def _limited(self) -> list[Instance]:
        instances = [one for function in self._functions.values() for one in function.instances]
        return [instance for instance in instances if instance.memory_bytes is not None]
