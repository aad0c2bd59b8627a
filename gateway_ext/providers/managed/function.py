"""What the functions of the docker and the process provider share, updates among it."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from common.tasks import error_of, until_first
from gateway_ext.errors import BadDeployment, GatewayError
from gateway_ext.model import Deployment, FunctionStatus, Troubles, Usage
from gateway_ext.ports import FunctionListener
from gateway_ext.providers.managed.logs import FunctionLog
from gateway_ext.providers.managed.records import R, RecordStore
from gateway_ext.providers.managed.replicas import ManagedSettings, Replica, ReplicaSet

log = logging.getLogger(__name__)

V = TypeVar("V", bound=ReplicaSet[Any])


class InstanceUsage(NamedTuple):
    """Resources of instances: processor seconds since their start, memory now."""

    cpu_s: float
    memory_bytes: int


class ManagedFunction(ABC, Generic[R, V]):
    """A deployed function; every change is stored first and carried out in the background.

    The version that serves, and the one that is to replace it, both run until that is ready.
    """

    note_suffix: str  # of the name under which lines about the deployment are logged
    usage_over_s: float  # how long processor use is measured

    def __init__(
        self,
        record: R,
        store: RecordStore[R],
        settings: ManagedSettings,
        listener: FunctionListener,
    ) -> None:
        self.record = record
        self.log = FunctionLog(record.deployment.id, record.folder, settings.log_bytes)
        self._store = store
        self._listener = listener
        self._drain_s = settings.drain_s
        self.current: V | None = None
        self.coming: V | None = None
        self._failed = ""  # why there is no version to start replicas of
        self._unserved = ""  # why what an earlier gateway accepted cannot be served
        self._stopped = False
        self._changed = asyncio.Event()
        self._hurried = asyncio.Event()
        self._making: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._retiring: dict[asyncio.Task[None], V] = {}

    @property
    @abstractmethod
    def secrets(self) -> set[str]:
        """Names of the secrets that running or coming instances read."""

    def took_over(self, version: V) -> None:
        """Called when this version serves instead of the one before it."""

    @abstractmethod
    def instances_ended(self, version: V) -> None:
        """Called when instances of a version have ended, perhaps its last ones."""

    @abstractmethod
    async def _measure(self) -> Sequence[InstanceUsage]:
        """Of each instance of the current and the coming version."""

    def template_text(self, *, usage: bool) -> str:
        """The state of what its instances are forked from, for people; empty if there is none."""
        del usage
        return ""

    @property
    def template_trouble(self) -> str:
        """Why what its instances are forked from is not warm; empty if nothing is wrong."""
        return ""

    @property
    def template_bytes(self) -> int:
        return 0

    @property
    def deployment(self) -> Deployment:
        """The deployment that was accepted last."""
        return self.record.deployment

    @property
    def wanted(self) -> int:
        return self.record.wanted

    def replace_version(self, make: Callable[[], Awaitable[V]]) -> None:
        """Make another version and replace the current one once the new one is ready."""
        before = self._making
        self._failed = ""
        self._making = asyncio.create_task(self._replace(make, before))
        self.notify()
        self._making.add_done_callback(self._note_made)

    def start_with(self, version: V) -> None:
        """Serve this version at once; some of its replicas may run already."""
        leaving = version.resize(self.wanted)
        self.current = version
        self.notify()
        self._retire(leaving, version)

    def scale(self, wanted: int) -> None:
        self.record = replace(self.record, wanted=wanted)
        self._store.save(self.record)
        leaving = [(version.resize(self.wanted), version) for version in self.versions]
        self.notify()
        for replicas, version in leaving:
            self._retire(replicas, version)
        self._changed.set()

    def report_failure(self, why: str) -> None:
        """Show why a version cannot be made yet; making it continues."""
        self._failed = why
        self.note(why)
        log.warning("%s: %s", self.deployment.id, why)
        self.notify()

    async def stop(self, *, drain: bool) -> None:
        """End all instances; with `drain` they may finish their calls first."""
        async with self._leaving():
            leaving = [replica for version in self.versions for replica in version.resize(0)]
            self.current = self.coming = None
            if not drain:
                self.hurry()
            await self._drain_and_stop(leaving, drain=drain)

    def hurry(self) -> None:
        """End all instances that leave, and those that will, without a wait for their calls."""
        self._hurried.set()

    async def detach(self) -> None:
        """Stop watching all instances; they continue to run."""
        async with self._leaving():
            self.hurry()
            replicas = [replica for version in self.versions for replica in version.replicas]
            await asyncio.gather(*(replica.detach() for replica in replicas))

    @asynccontextmanager
    async def _leaving(self) -> AsyncIterator[None]:
        """Make and renew nothing any more; at the end wait for all that was to end before."""
        self._stopped = True
        try:
            for task in (self._making, self._renewing):
                if task is not None:
                    task.cancel()
                    await asyncio.wait([task])
            yield
            if self._retiring:
                await asyncio.wait(list(self._retiring))
        finally:
            self.log.close()

    @property
    def versions(self) -> list[V]:
        return [version for version in (self.current, self.coming) if version is not None]

    @property
    def present(self) -> list[V]:
        """All versions that have instances, retiring ones too."""
        return [*self.versions, *self._retiring.values()]

    @property
    def settled(self) -> bool:
        return not self._retiring and self.coming is None

    @property
    def available(self) -> int:
        return len(self.current.endpoints) if self.current else 0

    @property
    def trouble(self) -> str:
        """The problem to show; empty if there is none."""
        if self._unserved or self._failed:
            return self._unserved or self._failed
        coming = self.coming.trouble if self.coming else ""
        return coming or (self.current.trouble if self.current else "")

    @property
    def troubles(self) -> Troubles:
        """Calls are refused only if neither the current version nor the newest may serve them."""
        template = self.template_trouble
        makes = self._making is not None and not self._making.done()
        newest = self.coming or (None if makes else self.current)
        broken = self._failed or (newest.broken if newest else "")
        if broken and (self.current is None or self.current.broken):
            return Troubles(broken, template)
        newest_first = [r for version in reversed(self.versions) for r in version.replicas]
        return Troubles(
            "",
            template,
            broken or next((r.broken for r in newest_first if r.broken), ""),
            next((r.dying for r in newest_first if r.dying), ""),
            next((r.slow for r in newest_first if r.slow), None),
        )

    async def status(self, *, usage: bool) -> FunctionStatus:
        """The current status; with `usage` it takes `usage_over_s` to measure."""
        return FunctionStatus(
            deployment=self.deployment,
            replicas=self.wanted,
            available_replicas=self.available,
            created_at=self.record.created_at,
            usage=await self._usage() if usage else None,
            trouble=self.trouble or self.template_trouble,
            template=self.template_text(usage=usage),
        )

    def note(self, text: str) -> None:
        """Write a line about the deployment to the function's log."""
        self.log.write(f"{self.deployment.id.name}-{self.note_suffix}", text)

    def changed(self) -> None:
        """Called when an instance became ready or stopped being so, or could not be started."""
        self._changed.set()
        if not self._stopped:
            self.notify()
            self._renew_outdated()

    def notify(self) -> None:
        current = self.current
        unserved = ""
        try:
            self._listener.function_is(
                self.deployment if current is None else current.deployment,
                [] if current is None else current.endpoints,
                wanted=self.wanted,
                troubles=self.troubles,
            )
        except BadDeployment as error:  # an earlier gateway took it; the others go on
            unserved = f"it is not served: {error}; deploy it again"
        if unserved and unserved != self._unserved:
            log.error("%s: %s", self.deployment.id, unserved)
        self._unserved = unserved

    async def _replace(
        self, make: Callable[[], Awaitable[V]], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        if (superseded := self.coming) is not None:
            self.coming = None
            self._retire(superseded.resize(0), superseded)
        self._failed = ""
        try:
            coming = await make()
        except (GatewayError, OSError) as error:
            self.report_failure(str(error))
            return
        self._failed = ""
        leaving, old = coming.resize(self.wanted), self.current
        if old is None:
            self.current = coming
        else:
            self.coming = coming
        self.notify()
        self._retire(leaving, coming)
        if old is not None:
            while len(coming.endpoints) < self.wanted:
                self._changed.clear()
                await self._changed.wait()
            self._swap(old, coming)

    def _note_made(self, task: asyncio.Task[None]) -> None:
        if (error := error_of(task)) is not None:
            self._failed = f"it could not be started: {error}"
            log.error("%s could not be started", self.deployment.id, exc_info=error)
            self.changed()

    def _renew_outdated(self) -> None:
        if self._renewing is not None and not self._renewing.done():
            return
        outdated = ((version, replica) for version in self.versions for replica in version.outdated)
        if (pair := next(outdated, None)) is not None:
            self._renewing = asyncio.create_task(self._renew(*pair))
            self._renewing.add_done_callback(self._renewed)

    async def _renew(self, version: V, old: Replica[Any]) -> None:
        """Have another replica take the place of this one, which ends its calls first."""
        if old not in version.replicas:
            return  # it left before this task's first turn, perhaps with its whole version
        new = version.add()
        while {old, new} <= set(version.replicas) and not new.ready:  # it is started until it is
            self._changed.clear()
            await self._changed.wait()
        if version not in self.versions:
            return  # none of its replicas is left
        leaving = []
        if new.ready and old in version.replicas:
            version.replicas.remove(old)
            old.leave()
            leaving.append(old)
        leaving += version.resize(self.wanted)
        self.notify()
        self._retire(leaving, version)

    def _renewed(self, task: asyncio.Task[None]) -> None:
        if (error := error_of(task)) is not None:
            log.error("%s: an instance is not renewed", self.deployment.id, exc_info=error)
        elif not self._stopped:
            self._renew_outdated()  # the next one

    def _swap(self, old: V, coming: V) -> None:
        self.current, self.coming = coming, None
        leaving = old.resize(0)
        self.notify()
        self._retire(leaving, old)  # before what follows, which may fail
        self.took_over(coming)

    def _retire(self, leaving: Sequence[Replica[Any]], version: V) -> None:
        task = asyncio.create_task(self._drain_and_stop(leaving, drain=True))
        self._retiring[task] = version
        task.add_done_callback(self._retired)

    def _retired(self, task: asyncio.Task[None]) -> None:
        version = self._retiring.pop(task)
        if (error := error_of(task)) is not None:
            log.error("%s: ending instances failed", version.deployment.id, exc_info=error)
        if not self._stopped:
            self.instances_ended(version)

    async def _drain_and_stop(self, leaving: Iterable[Replica[Any]], *, drain: bool) -> None:
        replicas = list(leaving)
        names = [replica.instance.name for replica in replicas if replica.instance is not None]
        try:
            if drain and names:
                drained = self._listener.drained(names, self._drain_s)
                await until_first(drained, self._hurried.wait())
        finally:
            await asyncio.gather(*(replica.stop() for replica in replicas))

    async def _usage(self) -> Usage:
        before_s = sum(instance.cpu_s for instance in await self._measure())
        await asyncio.sleep(self.usage_over_s)
        after = await self._measure()
        busy = max(0.0, sum(usage.cpu_s for usage in after) - before_s) / self.usage_over_s
        return Usage(round(busy * 1000, 1), sum(usage.memory_bytes for usage in after))
