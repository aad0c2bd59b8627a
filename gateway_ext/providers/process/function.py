"""One function: the version that serves, the one that is to follow, and how they change places."""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway_ext.errors import GatewayError
from gateway_ext.model import FunctionStatus, Usage
from gateway_ext.ports import Listener
from gateway_ext.providers.process import builds
from gateway_ext.providers.process.environments import Environments
from gateway_ext.providers.process.generation import Generation, Kit
from gateway_ext.providers.process.instance import Instance
from gateway_ext.providers.process.logs import FunctionLog
from gateway_ext.providers.process.processes import Taken
from gateway_ext.providers.process.replica import Replica
from gateway_ext.providers.process.store import Record, Store

log = logging.getLogger(__name__)

_USAGE_OVER_S = 0.2


class Function:
    """A deployed function; every change of it is kept, carried out behind, and told."""

    def __init__(
        self,
        record: Record,
        kit: Kit,
        store: Store,
        environments: Environments,
        listener: Listener,
        prune: Callable[[], Coroutine[Any, Any, None]],
        *,
        show_secrets: Callable[[Record, Iterable[str]], None],
    ) -> None:
        self.record = record
        self.log = FunctionLog(record.deployment.id, record.folder, kit.settings.log_bytes)
        self._kit = kit
        self._store = store
        self._environments = environments
        self._listener = listener
        self._prune = prune
        self._show_secrets = show_secrets
        self._had_others = False  # secrets that the version before this one may still read
        self._current: Generation | None = None
        self._coming: Generation | None = None
        self._failed = ""  # why there are no instances to speak of
        self._stopped = False
        self._pruning: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._bringing: asyncio.Task[None] | None = None
        self._retiring: dict[asyncio.Task[None], Path] = {}  # what still runs in which build

    def begin(self) -> None:
        """Save what is wanted now, and bring it about; what runs goes on until that is ready."""
        self._store.save(self.record)
        before = self._bringing
        if self._current is None:
            self._tell()
        self._bringing = asyncio.create_task(self._bring(self.record, before))
        self._bringing.add_done_callback(self._brought)

    def update(self, record: Record) -> None:
        """Another version of it is wanted."""
        before, self.record = self.record, record
        self._had_others = True
        self.begin()
        if before.build not in self.builds:
            self._store.discard(before.build)

    def scale(self, wanted: int) -> None:
        """So many replicas."""
        self.record = replace(self.record, wanted=wanted)
        self._store.save(self.record)
        leaving = [(one.resize(wanted), one.record.build) for one in self._generations]
        self._tell()
        for replicas, build in leaving:
            self._retire(replicas, build)
        self._changed.set()

    async def stop(self, *, drain: bool) -> None:
        """End every instance; with `drain` calls in flight may end before."""
        self._stopped = True
        if self._bringing is not None:
            self._bringing.cancel()
            await asyncio.wait([self._bringing])
        leaving = [replica for one in self._generations for replica in one.resize(0)]
        self._current = self._coming = None
        for task in list(self._retiring) if not drain else ():
            task.cancel()
        try:
            await self._leave(leaving, drain=drain)
            if self._retiring:
                await asyncio.wait(list(self._retiring))
        finally:
            self.log.close()

    async def status(self, *, usage: bool) -> FunctionStatus:
        """How it is now."""
        available = len(self._current.endpoints) if self._current else 0
        return FunctionStatus(
            deployment=self.record.deployment,
            replicas=self.record.wanted,
            available_replicas=available,
            created_at=self.record.created_at,
            usage=await self._usage() if usage else None,
            trouble=self._trouble(),
        )

    @property
    def builds(self) -> set[Path]:
        """Those that something runs in, or soon will."""
        present = {generation.record.build for generation in self._generations}
        return {self.record.build, *present, *self._retiring.values()}

    @property
    def secrets(self) -> set[str]:
        """Those that something running, or soon to run, reads."""
        records = [self.record, *(generation.record for generation in self._generations)]
        return {name for record in records for name in record.deployment.secrets}

    @property
    def instances(self) -> list[Instance]:
        """Those that live, of whichever version."""
        return [instance for one in self._generations for instance in one.instances]

    @property
    def _generations(self) -> list[Generation]:
        return [one for one in (self._current, self._coming) if one is not None]

    def _trouble(self) -> str:
        if self._failed:
            return self._failed
        coming = self._coming.trouble if self._coming else ""
        return coming or (self._current.trouble if self._current else "")

    async def _bring(self, record: Record, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        if self._coming is not None:
            self._abandon(self._coming)
        self._failed = ""
        try:
            requirements = await asyncio.to_thread(builds.requirements_of, record.build)
            python = await self._environments.ready(requirements, self._say)
            coming = Generation(record, python, self._kit, self.log, self._on_change)
        except (GatewayError, OSError) as error:
            self._failed = str(error)
            self._say(self._failed)
            log.warning("%s: %s", record.deployment.id, error)
            self._tell()
            return
        coming.resize(self.record.wanted)
        if self._current is None:
            self._current = coming
            self._tell()
            return
        self._coming = coming
        await self._until_ready(coming)
        self._swap(coming)

    def _brought(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = f"it could not be started: {error}"
            log.error("%s could not be started", self.record.deployment.id, exc_info=error)

    async def _until_ready(self, coming: Generation) -> None:
        while len(coming.endpoints) < self.record.wanted:
            self._changed.clear()
            await self._changed.wait()

    def _swap(self, coming: Generation) -> None:
        old, self._current, self._coming = self._current, coming, None
        leaving = old.resize(0) if old is not None else []
        self._tell()
        build = old.record.build if old is not None else coming.record.build
        self._retire(leaving, build)

    def _abandon(self, coming: Generation) -> None:
        """Another version is wanted before this one was ready."""
        self._coming = None
        self._retire(coming.resize(0), coming.record.build)

    def _retire(self, leaving: list[Replica], build: Path) -> None:
        task = asyncio.create_task(self._leave(leaving, drain=True))
        self._retiring[task] = build
        task.add_done_callback(functools.partial(self._retired, build))

    def _retired(self, build: Path, task: asyncio.Task[None]) -> None:
        del self._retiring[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "%s: instances were not ended well", self.record.deployment.id, exc_info=error
            )
        if self._stopped:
            return
        if self._had_others and not self._retiring and self._coming is None:
            self._had_others = False
            self._show_secrets(self.record, self.secrets)
        if build not in self.builds:
            self._store.discard(build)
            self._pruning = asyncio.create_task(self._prune())

    async def _leave(self, leaving: Iterable[Replica], *, drain: bool) -> None:
        replicas = list(leaving)
        names = [one.instance.name for one in replicas if one.instance is not None]
        try:
            if drain and names:
                await self._listener.drained(names, self._kit.settings.drain_s)
        finally:
            await asyncio.gather(*(replica.stop() for replica in replicas))

    def _on_change(self) -> None:
        self._changed.set()
        if not self._stopped:
            self._tell()

    def _tell(self) -> None:
        current = self._current
        if current is None:
            self._listener.function_is(self.record.deployment, [], wanted=self.record.wanted)
            return
        deployment = current.record.deployment
        self._listener.function_is(deployment, current.endpoints, wanted=self.record.wanted)

    def _say(self, text: str) -> None:
        self.log.write(f"{self.record.deployment.id.name}-build", text)

    async def _usage(self) -> Usage:
        before = await asyncio.to_thread(self._taken)
        await asyncio.sleep(_USAGE_OVER_S)
        after = await asyncio.to_thread(self._taken)
        busy = max(0.0, after.cpu_s - before.cpu_s) / _USAGE_OVER_S
        return Usage(round(busy * 1000, 1), after.resident_bytes)

    def _taken(self) -> Taken:
        each = [instance.taken() for instance in self.instances]
        return (
            Taken(*(sum(parts) for parts in zip(*each, strict=True))) if each else Taken(0.0, 0, 0)
        )
