"""One function of the process provider: its build, its environment, and the processes of both."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any

from gateway_ext.ports import FunctionListener
from gateway_ext.providers.managed.managed_function import InstanceUsage, ManagedFunction
from gateway_ext.providers.process import build_folders, process_table
from gateway_ext.providers.process.build_store import BuildRecord, BuildStore
from gateway_ext.providers.process.child_instance import ChildInstance
from gateway_ext.providers.process.environments.python_environments import PythonEnvironments
from gateway_ext.providers.process.process_version import (
    ProcessParts,
    ProcessVersion,
    memory_limit_bytes,
)


class ProcessFunction(ManagedFunction[BuildRecord, ProcessVersion]):
    """A deployed function; `prune` and `show_secrets` are the provider's."""

    note_suffix = "build"
    usage_over_s = 0.2

    def __init__(
        self,
        record: BuildRecord,
        parts: ProcessParts,
        store: BuildStore,
        environments: PythonEnvironments,
        listener: FunctionListener,
        prune: Callable[[], Coroutine[Any, Any, None]],
        *,
        show_secrets: Callable[[BuildRecord, Iterable[str]], None],
    ) -> None:
        super().__init__(record, store, parts.settings, listener)
        self._parts = parts
        self._environments = environments
        self._prune = prune
        self._show_secrets = show_secrets
        self._shows_old_secrets = False  # those that the previous version may still read
        self._pruning: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Store the record and start its build; the current version serves until it is ready."""
        self._store.save(self.record)
        record = self.record
        self._rollout.begin(lambda: self._make(record))

    def update(self, record: BuildRecord) -> None:
        """Replace the current version by that of another record."""
        before, self.record = self.record, record
        self._shows_old_secrets = True
        self.begin()
        if before.build not in self.builds:
            self._store.discard(before.build)

    @property
    def builds(self) -> set[Path]:
        """Builds that instances run in, now or soon."""
        return {self.record.build, *(one.record.build for one in self._rollout.present)}

    @property
    def secrets(self) -> set[str]:
        """Names of the secrets that running or coming instances read."""
        records = [self.record, *(one.record for one in self._rollout.versions)]
        return {name for record in records for name in record.deployment.secrets}

    @property
    def instances(self) -> list[ChildInstance]:
        """Instances that are alive, of the current and the coming version."""
        return [instance for one in self._rollout.versions for instance in one.instances]

    @property
    def memory_bytes(self) -> int | None:
        """The most memory of one instance; None if there is no limit."""
        return memory_limit_bytes(self.record.deployment)

    def enforce_memory_limit_outside(self, pids: Collection[int], used_bytes: int) -> None:
        """Kill processes that left their instances if they take more than an instance may."""
        limit_bytes = self.memory_bytes
        if limit_bytes is not None and used_bytes > limit_bytes:
            process_table.kill(pids)
            self.note(
                f"processes that left their instance were killed: they took {used_bytes >> 20} MiB"
                f" of memory, the limit is {limit_bytes >> 20} MiB"
            )

    def took_over(self, version: ProcessVersion) -> None:
        """Nothing to do: what the previous version had is deleted when its instances end."""

    def instances_ended(self, version: ProcessVersion) -> None:
        """Delete secrets, build and environment that no version needs any more."""
        if self._shows_old_secrets and self._rollout.settled:
            self._shows_old_secrets = False
            self._show_secrets(self.record, self.secrets)
        if version.record.build not in self.builds:
            self._store.discard(version.record.build)
            self._pruning = asyncio.create_task(self._prune())

    async def _make(self, record: BuildRecord) -> ProcessVersion:
        requirements = await asyncio.to_thread(build_folders.requirements_of, record.build)
        namespace = record.deployment.id.namespace
        python = await self._environments.ready(namespace, requirements, self.note)
        return ProcessVersion(record, python, self._parts, self.log, self._rollout.changed)

    async def _measure(self) -> InstanceUsage:
        each = await asyncio.to_thread(lambda: [one.usage() for one in self.instances])
        return InstanceUsage(
            sum(one.cpu_s for one in each), sum(one.resident_bytes for one in each)
        )
