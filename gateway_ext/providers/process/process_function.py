"""One function of the process provider: its build, its environment, and the processes of both."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any

from common.tasks import BackgroundTasks
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
from gateway_ext.providers.process.template.template_bounds import BoundedTemplate

log = logging.getLogger(__name__)


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
        self._made: list[ProcessVersion] = []  # those whose templates are not closed
        self._closing = BackgroundTasks(log, "ending templates")

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
    def templates(self) -> list[BoundedTemplate]:
        """The templates that are alive."""
        return [
            BoundedTemplate(one.template, bool(one.replicas))
            for one in self._made
            if one.template.alive
        ]

    @property
    def template_bytes(self) -> int:
        """The memory of the templates of all its versions."""
        return sum(one.template.memory_bytes for one in self._made)

    def renew_templates(self, why: str) -> None:
        """Have later instances import the handler anew."""
        for version in self._made:
            version.template.renew(why)

    def template_text(self, *, usage: bool) -> str:
        """The state of the current version's template, for people."""
        current = self._rollout.current
        if current is None:
            return ""
        template = current.template
        memory = f", {template.memory_bytes >> 20} MiB" if usage and template.alive else ""
        return f"{template.text}{memory}"

    @property
    def template_trouble(self) -> str:
        """Why the current version's template is not warm although it has example calls."""
        current = self._rollout.current
        return "" if current is None else current.template.bad_examples

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

    async def stop(self, *, drain: bool) -> None:
        """End all instances and templates."""
        try:
            await super().stop(drain=drain)
        finally:
            await asyncio.gather(*(one.template.close() for one in self._made))
            await self._closing.wait()

    def instances_ended(self, version: ProcessVersion) -> None:
        """End the template, and delete secrets, build and environment that nothing needs."""
        if version not in self._rollout.present and version in self._made:
            self._made.remove(version)
            self._closing.start(version.template.close())
        if self._shows_old_secrets and self._rollout.settled:
            self._show_secrets(self.record, self.secrets)
            # The next version may still be in the making, and the previous one serve meanwhile.
            self._shows_old_secrets = self.secrets != set(self.record.deployment.secrets)
        if version.record.build not in self.builds:
            self._store.discard(version.record.build)
            self._pruning = asyncio.create_task(self._prune())

    async def _make(self, record: BuildRecord) -> ProcessVersion:
        requirements = await asyncio.to_thread(build_folders.requirements_of, record.build)
        namespace = record.deployment.id.namespace
        python = await self._environments.ready(namespace, requirements, self.note)
        made = ProcessVersion(record, python, self._parts, self.log, self._rollout.changed)
        self._made.append(made)
        return made

    async def _measure(self) -> InstanceUsage:
        each = await asyncio.to_thread(lambda: [one.usage() for one in self.instances])
        return InstanceUsage(
            sum(one.cpu_s for one in each), sum(one.resident_bytes for one in each)
        )
