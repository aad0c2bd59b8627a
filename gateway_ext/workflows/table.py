"""The deployed workflows, each in a file of its own: its workflow.yml as it was sent."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from common.whole_files import put_file
from gateway_ext.errors import BadRequest, QueueAway
from gateway_ext.jobs.shared import SharedTexts, TextKey
from gateway_ext.model import DEFAULT_NAMESPACE
from gateway_ext.openfaas import valid_names
from gateway_ext.workflows.errors import BadWorkflowFile, UnknownWorkflow
from gateway_ext.workflows.plan import WorkflowId, WorkflowPlan, read_workflow
from gateway_ext.workflows.yaml_lines import MOST_BYTES

MOST_WORKFLOWS = 1_000
_SUFFIX = ".yml"
_log = logging.getLogger(__name__)


class Workflows:
    """All workflows that a gateway knows; a change is on disk when its call returns.

    `on_change` is called with the name of every workflow that is added, replaced or removed.
    Where gateways share their workflows (`SharedWorkflows`), this table is a copy that follows.
    `refused` has the stored ones that these rules refuse, each with the reason and its path.
    """

    def __init__(
        self, folder: Path, on_change: Callable[[WorkflowId], None] = lambda _: None
    ) -> None:
        self._folder = folder
        self._on_change = on_change
        self._plans: dict[WorkflowId, WorkflowPlan] = {}
        self._changing = asyncio.Lock()
        self.changes = 0  # how often a workflow was added, replaced or removed
        self._unread = ""  # why one that is missing here may be shared
        self.refused: dict[str, str] = {}
        self._refused_texts: dict[TextKey, str] = {}

    def __iter__(self) -> Iterator[WorkflowPlan]:
        return iter([self._plans[name] for name in sorted(self._plans)])

    def __len__(self) -> int:
        return len(self._plans)

    def open(self) -> None:
        """Read what is stored; what these rules refuse stays on the disk, and is left out."""
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.iterdir()):
            if not path.is_file():
                continue
            if path.name.startswith("."):  # the gateway ended while it wrote
                path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                self._read(path)

    def texts(self) -> dict[TextKey, str]:
        """The files of all workflows, and of the refused ones where gateways can share them."""
        return self._refused_texts | {plan.id: plan.text for plan in self}

    def missing_because(self, why: str) -> None:
        """See `TextCopy`."""
        self._unread = why

    def by_path(self, name: bytes) -> WorkflowPlan | None:
        """The workflow of the path segment `name` or `name.namespace`."""
        short, dot, namespace = name.decode("latin-1").partition(".")
        plan = self._plans.get(WorkflowId(namespace if dot else DEFAULT_NAMESPACE, short))
        if plan is None and name and self._unread:
            raise QueueAway(self._unread)
        return plan

    def by_id(self, workflow: WorkflowId) -> WorkflowPlan:
        """Raise UnknownWorkflow if there is none."""
        plan = self._plans.get(workflow)
        if plan is None:
            raise QueueAway(self._unread) if self._unread else UnknownWorkflow(*workflow)
        return plan

    def check_stored(self, workflow: WorkflowId) -> None:
        """Raise UnknownWorkflow if it is neither known nor stored and refused."""
        if str(workflow) not in self.refused:
            self.by_id(workflow)

    def get(self, workflow: WorkflowId) -> WorkflowPlan | None:
        return self._plans.get(workflow)

    def of_namespace(self, namespace: str) -> list[WorkflowPlan]:
        return [plan for plan in self if plan.id.namespace == namespace]

    def check_new(self, plan: WorkflowPlan, *, update: bool) -> None:
        """Raise if it may not be deployed: with `update` it must exist, and there is a bound."""
        if update:
            self.check_stored(plan.id)
        if plan.id not in self._plans and len(self._plans) >= MOST_WORKFLOWS:
            raise BadRequest(f"there are {MOST_WORKFLOWS} workflows, as many as may be")

    async def deploy(self, plan: WorkflowPlan, *, update: bool) -> None:
        """Store a workflow, and replace one of that name, which must exist with `update`."""
        async with self._changing:
            self.check_new(plan, update=update)
            await asyncio.to_thread(self._store, plan.id, plan)
            self._put(plan.id, plan)

    async def remove(self, workflow: WorkflowId) -> None:
        """Remove a workflow; its runs under way go on."""
        async with self._changing:
            self.check_stored(workflow)
            await asyncio.to_thread(self._store, workflow, None)
            self._put(workflow, None)

    async def follow(self, key: TextKey, text: str | None) -> None:
        """See `TextCopy`: first this table has the workflow, then the disk."""
        workflow = WorkflowId(*key)
        known, plan = self._plans.get(workflow), None
        if text is None:
            if known is None and str(workflow) not in self.refused:
                return
        elif known is not None and known.text == text:
            return
        else:
            plan = await asyncio.to_thread(read_workflow, text)
            if plan.id != workflow:
                raise BadWorkflowFile(f"it is the file of {plan.id}")
            _log.info("the workflow %s is deployed, by this gateway or another", workflow)
        async with self._changing:
            self._put(workflow, plan)
            await asyncio.to_thread(self._store, workflow, plan)

    def _read(self, path: Path) -> None:
        text = ""
        try:
            text = path.read_text(encoding="utf-8")
            plan = read_workflow(text)
            self._put(plan.id, plan)
        except (BadWorkflowFile, UnicodeDecodeError) as error:
            why = f"{'; '.join(str(error).splitlines())} ({path})"
            self.refused[path.stem] = why
            _log.error("the workflow %s is left out: %s", path.stem, why)
            workflow = _stored_as(path)
            if workflow is not None and 0 < len(text.encode()) <= MOST_BYTES:
                self._refused_texts[workflow] = text

    def _put(self, workflow: WorkflowId, plan: WorkflowPlan | None) -> None:
        if plan is None:
            self._plans.pop(workflow, None)
        else:
            self._plans[workflow] = plan
        self.refused.pop(str(workflow), None)
        self._refused_texts.pop(workflow, None)
        self.changes += 1
        self._on_change(workflow)

    def _store(self, workflow: WorkflowId, plan: WorkflowPlan | None) -> None:
        if plan is None:
            self._path(workflow).unlink(missing_ok=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        put_file(self._path(workflow), plan.text.encode(), 0o600)

    def _path(self, workflow: WorkflowId) -> Path:
        return self._folder / f"{workflow}{_SUFFIX}"


@dataclass(frozen=True, slots=True)
class SharedWorkflows:
    """Changes the workflows of all gateways that share them; this one's table follows."""

    workflows: Workflows
    shared: SharedTexts

    async def deploy(self, plan: WorkflowPlan, *, update: bool) -> None:
        """See `Workflows.deploy`."""
        self.shared.check()
        self.workflows.check_new(plan, update=update)
        await self.shared.write(plan.id, plan.text)

    async def remove(self, workflow: WorkflowId) -> None:
        """See `Workflows.remove`."""
        self.shared.check()
        self.workflows.check_stored(workflow)
        await self.shared.write(workflow, None)


WorkflowChanges: TypeAlias = Workflows | SharedWorkflows


def _stored_as(path: Path) -> WorkflowId | None:
    """The workflow whose file this table writes there."""
    try:
        named = valid_names.function_id(path.stem)
    except BadRequest:
        return None
    workflow = WorkflowId(named.namespace, named.name)
    return workflow if str(workflow) == path.stem else None
