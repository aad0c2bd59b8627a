"""The workflows of one gateway: their table, their runs, their routes, and jobs of them."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.calls.invoke import StreamedResponse
from gateway_ext.errors import TooLarge
from gateway_ext.features import Hooks
from gateway_ext.jobs.values import AsyncCall, StoredBody, whole
from gateway_ext.model import FunctionId
from gateway_ext.workflows.errors import UnknownWorkflow
from gateway_ext.workflows.history import RunHistory, WorkflowMeters
from gateway_ext.workflows.intake import WorkflowIntake
from gateway_ext.workflows.limits import RunLimits
from gateway_ext.workflows.plan import WorkflowId
from gateway_ext.workflows.routes import WorkflowRoutes, WorkflowRows
from gateway_ext.workflows.runs import WorkflowCalls
from gateway_ext.workflows.table import SharedWorkflows, WorkflowChanges, Workflows

_FOLDER = "workflows"
# Says of which servers the folder is a copy; without it the folder is this gateway's own.
_COPIED = "workflows.copied"
# A job's target is a function's id. That of a workflow has a name that no function can have.
_JOBS = "workflow"


@asynccontextmanager
async def workflows(gateway: Hooks) -> AsyncIterator[Workflows]:
    """Serve workflows of the gateway's functions, by their own paths and as jobs; their table."""
    settings = gateway.settings
    limits = RunLimits(
        settings.workflow_runs,
        settings.workflow_held_bytes,
        settings.workflow_answer_bytes,
        settings.workflow_json_bytes,
    )
    history = RunHistory()

    def changed(workflow: WorkflowId) -> None:
        history.forget(workflow)
        counts.gone(str(workflow))

    table = Workflows(Path(settings.state_dir) / _FOLDER, changed)
    counts = WorkflowMeters(limits, settings.metric_names, table.get)
    table.open()
    gateway.meters.add(counts.families)
    calls = WorkflowCalls(gateway.invoke, limits, history, counts)
    async with _changes(gateway, table) as changes:

        async def remove_namespace(namespace: str) -> None:
            for plan in table.of_namespace(namespace):
                with suppress(UnknownWorkflow):  # somebody else has removed it meanwhile
                    await changes.remove(plan.id)

        guard = gateway.invoke.guard
        routes = WorkflowRoutes(table, changes, gateway.functions, history, gateway.meters).app()
        gateway.routes["workflow"] = WorkflowIntake(table, calls, guard, settings.timeout_s)
        gateway.routes["async-workflow"] = gateway.intake(
            lambda name: _target(table, name),
            what="workflow",
            max_body_bytes=min(settings.async_max_body_bytes, settings.workflow_answer_bytes),
        )
        gateway.below_system.update(workflows=routes, workflow=routes)
        gateway.job_calls[_JOBS] = WorkflowJobs(table, calls)
        gateway.namespace_removed.append(remove_namespace)
        gateway.sections["workflows"] = WorkflowRows(table, history).look
        gateway.alerts.append(lambda: left_out(table.refused))
        yield table


@asynccontextmanager
async def _changes(gateway: Hooks, table: Workflows) -> AsyncIterator[WorkflowChanges]:
    """Workflows are shared with the gateways with which this one shares its jobs."""
    copied = Path(gateway.settings.state_dir) / _COPIED
    if gateway.shared is None:
        copied.unlink(missing_ok=True)
        yield table
        return
    async with gateway.shared.texts("workflows", table, copied, gateway.log) as shared:
        yield SharedWorkflows(table, shared)


def left_out(refused: Mapping[str, str]) -> Iterable[Mapping[str, str]]:
    """Alerts of the stored workflows that are refused, each with the reason."""
    for name, why in refused.items():
        yield {
            "level": "warning",
            "code": "workflow-left-out",
            "about": name,
            "text": f"the stored workflow {name} is left out: {why}",
            "what_to_do": "mend its file and deploy it again, or remove it: gpufaas workflow",
        }


def _target(table: Workflows, name: bytes) -> FunctionId | None:
    """What stands in jobs for the workflow that a path names."""
    plan = table.by_path(name)
    return None if plan is None else FunctionId(plan.id.namespace, f"{_JOBS}:{plan.id.name}")


@dataclass(frozen=True, slots=True)
class WorkflowJobs:
    """See `FunctionCalls`: runs the workflow that a job names."""

    table: Workflows
    calls: WorkflowCalls

    @asynccontextmanager
    async def call(self, call: AsyncCall, body: StoredBody) -> AsyncIterator[StreamedResponse]:
        namespace, name = call.function
        plan = self.table.by_id(WorkflowId(namespace, name.removeprefix(f"{_JOBS}:")))
        most_bytes = self.calls.limits.answer_bytes
        if body.size_bytes > most_bytes:
            raise TooLarge(most_bytes)
        with self.calls.limits.share() as share:
            share.hold(body.size_bytes)
            content = await whole(body)
            running = self.calls.call(plan, call.id, call.headers, call.query, content, share)
            async with running as answer:
                yield answer
