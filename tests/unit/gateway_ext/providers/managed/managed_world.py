"""A function of a managed provider, and an instance of it, without processes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway_ext.model import Deployment, Endpoint, FunctionId
from gateway_ext.ports import FunctionListener
from gateway_ext.providers.managed.function import InstanceUsage, ManagedFunction
from gateway_ext.providers.managed.logs import FunctionLog
from gateway_ext.providers.managed.records import RecordStore
from gateway_ext.providers.managed.replicas import ManagedInstance, ManagedSettings, ReplicaSet

F = FunctionId("n", "f")
DEPLOYMENT = Deployment(F, "reg/f:1")


class MortalInstance(ManagedInstance):
    """An instance that is ready at once, and dies of itself after a time."""

    endpoint = Endpoint("f-1", "unix:/nowhere")

    def __init__(self, lives_s: float) -> None:
        super().__init__("f-1")
        self.ready = True
        asyncio.get_running_loop().call_later(lives_s, self.kill, "died")

    async def collect_output(self) -> None:
        await asyncio.shield(self.exited)

    async def until_ready(self, within_s: float) -> bool:
        del within_s
        return self.ready

    async def stop(self, within_s: float) -> None:
        del within_s
        self.kill("was stopped")

    def kill(self, why: str) -> None:
        self.set_ended(why)

    async def _is_ready(self) -> bool:
        return self.ready


class MadeVersion(ReplicaSet[Any]):
    """A version whose instances come from a test."""

    deployment = DEPLOYMENT

    def __init__(
        self,
        output: FunctionLog,
        make: Callable[[], Awaitable[MortalInstance]],
        settings: ManagedSettings,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(changed, output, settings)
        self._made = make

    async def make(self) -> MortalInstance:
        return await self._made()


@dataclass(frozen=True)
class StillRecord:
    """A function with one replica, or as many as it was scaled to."""

    folder: Path
    deployment: Deployment = DEPLOYMENT
    created_at: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    wanted: int = 1


class StillFunction(ManagedFunction[StillRecord, Any]):
    """A function whose versions come from a test, and leave nothing behind."""

    note_suffix = "build"
    usage_over_s = 0.1

    def __init__(self, folder: Path, listener: FunctionListener) -> None:
        store = RecordStore(folder, StillRecord)
        super().__init__(StillRecord(folder), store, ManagedSettings(drain_s=1.0), listener)

    @property
    def secrets(self) -> set[str]:
        return set()

    def instances_ended(self, version: object) -> None:
        del version

    async def _measure(self) -> Sequence[InstanceUsage]:
        return ()
