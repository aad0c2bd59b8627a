"""What the functions of the docker and the process provider share."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, NamedTuple

from gateway_ext.model import Deployment, FunctionStatus, Usage
from gateway_ext.ports import FunctionListener
from gateway_ext.providers.managed.logs.function_log import FunctionLog
from gateway_ext.providers.managed.managed_settings import ManagedSettings
from gateway_ext.providers.managed.record_store import R, RecordStore
from gateway_ext.providers.managed.rollout import Rollout, V


class InstanceUsage(NamedTuple):
    """Resources of instances: processor seconds since their start, memory now."""

    cpu_s: float
    memory_bytes: int


class ManagedFunction(ABC, Generic[R, V]):
    """A deployed function; every change is stored first and carried out in the background."""

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
        self._rollout: Rollout[V] = Rollout(self, listener, settings.drain_s)

    @property
    @abstractmethod
    def secrets(self) -> set[str]:
        """Names of the secrets that running or coming instances read."""

    @abstractmethod
    def took_over(self, version: V) -> None:
        """Called when this version serves instead of the one before it."""

    @abstractmethod
    def instances_ended(self, version: V) -> None:
        """Called when instances of a version have ended, perhaps its last ones."""

    @abstractmethod
    async def _measure(self) -> InstanceUsage:
        """Sum over all instances of the current and the coming version."""

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
        """The memory of what its instances are forked from."""
        return 0

    @property
    def deployment(self) -> Deployment:
        """The deployment that was accepted last."""
        return self.record.deployment

    @property
    def wanted(self) -> int:
        """The number of replicas."""
        return self.record.wanted

    def scale(self, wanted: int) -> None:
        """Store and apply another number of replicas."""
        self.record = replace(self.record, wanted=wanted)
        self._store.save(self.record)
        self._rollout.resize()

    async def stop(self, *, drain: bool) -> None:
        """End all instances; with `drain` they may finish their calls first."""
        try:
            await self._rollout.stop(drain=drain)
        finally:
            self.log.close()

    def hurry(self) -> None:
        """Have a `stop` that is under way wait for no call any more."""
        self._rollout.hurry()

    async def status(self, *, usage: bool) -> FunctionStatus:
        """The current status; with `usage` it takes `usage_over_s` to measure."""
        return FunctionStatus(
            deployment=self.deployment,
            replicas=self.wanted,
            available_replicas=self._rollout.available,
            created_at=self.record.created_at,
            usage=await self._usage() if usage else None,
            trouble=self._rollout.trouble or self.template_trouble,
            template=self.template_text(usage=usage),
        )

    def note(self, text: str) -> None:
        """Write a line about the deployment to the function's log."""
        self.log.write(f"{self.deployment.id.name}-{self.note_suffix}", text)

    async def _usage(self) -> Usage:
        before = await self._measure()
        await asyncio.sleep(self.usage_over_s)
        after = await self._measure()
        busy = max(0.0, after.cpu_s - before.cpu_s) / self.usage_over_s
        return Usage(round(busy * 1000, 1), after.memory_bytes)
