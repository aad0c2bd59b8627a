"""One function: what is wanted of it, kept on disk and brought about."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway_ext.model import Deployment, FunctionStatus, Usage
from gateway_ext.ports import Listener
from gateway_ext.providers.function_log import FunctionLog
from gateway_ext.providers.process import builds
from gateway_ext.providers.process.environments import Environments
from gateway_ext.providers.process.generation import Generation, Kit
from gateway_ext.providers.process.instance import Instance
from gateway_ext.providers.process.processes import Taken
from gateway_ext.providers.process.store import Record, Store
from gateway_ext.providers.rollout import Rollout

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
        self._prune = prune
        self._show_secrets = show_secrets
        self._had_others = False  # secrets that the version before this one may still read
        self._pruning: asyncio.Task[None] | None = None
        self._rollout: Rollout[Generation] = Rollout(self, listener, kit.settings.drain_s)

    def begin(self) -> None:
        """Save what is wanted now, and bring it about; what runs goes on until that is ready."""
        self._store.save(self.record)
        record = self.record
        self._rollout.begin(lambda: self._make(record))

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
        self._rollout.resize()

    async def stop(self, *, drain: bool) -> None:
        """End every instance; with `drain` calls in flight may end before."""
        try:
            await self._rollout.stop(drain=drain)
        finally:
            self.log.close()

    async def status(self, *, usage: bool) -> FunctionStatus:
        """How it is now."""
        return FunctionStatus(
            deployment=self.record.deployment,
            replicas=self.record.wanted,
            available_replicas=self._rollout.available,
            created_at=self.record.created_at,
            usage=await self._usage() if usage else None,
            trouble=self._rollout.trouble,
        )

    @property
    def deployment(self) -> Deployment:
        """What is wanted now."""
        return self.record.deployment

    @property
    def wanted(self) -> int:
        """So many replicas."""
        return self.record.wanted

    @property
    def builds(self) -> set[Path]:
        """Those that something runs in, or soon will."""
        return {self.record.build, *(one.record.build for one in self._rollout.present)}

    @property
    def secrets(self) -> set[str]:
        """Those that something running, or soon to run, reads."""
        records = [self.record, *(one.record for one in self._rollout.versions)]
        return {name for record in records for name in record.deployment.secrets}

    @property
    def instances(self) -> list[Instance]:
        """Those that live, of whichever version."""
        return [instance for one in self._rollout.versions for instance in one.instances]

    def say(self, text: str) -> None:
        """A line about its building, in its log."""
        self.log.write(f"{self.record.deployment.id.name}-build", text)

    def followed(self, version: Generation) -> None:
        """A version has taken over: what that means for the one before comes with its end."""
        del version

    def left(self, version: Generation) -> None:
        """What no version needs any more goes."""
        if self._had_others and self._rollout.settled:
            self._had_others = False
            self._show_secrets(self.record, self.secrets)
        if version.record.build not in self.builds:
            self._store.discard(version.record.build)
            self._pruning = asyncio.create_task(self._prune())

    async def _make(self, record: Record) -> Generation:
        requirements = await asyncio.to_thread(builds.requirements_of, record.build)
        python = await self._environments.ready(requirements, self.say)
        return Generation(record, python, self._kit, self.log, self._rollout.changed)

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
