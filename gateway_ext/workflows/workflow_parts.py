"""Builds the workflows of one gateway: their table, their runs, their routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from logging import Logger
from pathlib import Path

from common.http.asgi import App
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.errors import UnknownWorkflow
from gateway_ext.jobs.async_jobs import JobTargets
from gateway_ext.jobs.execution.invoke_calls import InvokeCalls
from gateway_ext.jobs.queue_choice import jetstream_settings
from gateway_ext.metrics.call_counts import GatewayMeters
from gateway_ext.openfaas.system_routes import NamespaceRemoved
from gateway_ext.settings import GatewaySettings
from gateway_ext.workflows.plan.workflow_values import WorkflowId
from gateway_ext.workflows.run.run_history import RunHistory
from gateway_ext.workflows.run.run_limits import RunLimits
from gateway_ext.workflows.run.workflow_calls import WorkflowCalls
from gateway_ext.workflows.run.workflow_meters import WorkflowMeters
from gateway_ext.workflows.shared.workflow_stream import WorkflowStream
from gateway_ext.workflows.workflow_intake import WorkflowIntake
from gateway_ext.workflows.workflow_jobs import JobTargetCalls, WorkflowTargets
from gateway_ext.workflows.workflow_routes import WorkflowChanges, make_workflow_routes
from gateway_ext.workflows.workflow_table import Workflows

_FOLDER = "workflows"
# Names the stream of which the folder is a copy; without it the folder is this gateway's own.
_COPIED = "workflows.copied"


@dataclass(frozen=True, slots=True)
class WorkflowParts:
    """`app` serves /workflow, `routes` what is below /system; `targets` is what jobs may call.

    `namespace_removed` removes the workflows of a namespace.
    """

    app: App
    routes: App
    targets: JobTargets
    workflows: Workflows
    history: RunHistory
    namespace_removed: NamespaceRemoved


@asynccontextmanager
async def workflow_parts(
    settings: GatewaySettings,
    functions: Functions,
    invoke: Invoke,
    meters: GatewayMeters,
    log: Logger,
) -> AsyncIterator[WorkflowParts]:
    """Read the stored workflows, and make the parts that run them; the context ends them."""
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

    workflows = Workflows(Path(settings.state_dir) / _FOLDER, changed)
    counts = WorkflowMeters(limits, settings.metric_names, workflows.get)
    workflows.open()
    meters.add(counts.families)
    calls = WorkflowCalls(invoke, limits, history, counts)
    targets = WorkflowTargets(workflows)
    async with _changes(settings, workflows, log) as changes:

        async def namespace_removed(namespace: str) -> None:
            for plan in workflows.of_namespace(namespace):
                with suppress(UnknownWorkflow):  # somebody else has removed it meanwhile
                    await changes.remove(plan.id)

        yield WorkflowParts(
            app=WorkflowIntake(workflows, calls, invoke.guard, settings.timeout_s),
            routes=make_workflow_routes(workflows, changes, functions, history, meters),
            workflows=workflows,
            history=history,
            namespace_removed=namespace_removed,
            targets=JobTargets(
                function_by_path=functions.id_by_path,
                workflow_by_path=targets.by_path,
                calls=JobTargetCalls(InvokeCalls(invoke), workflows, calls),
            ),
        )


@asynccontextmanager
async def _changes(
    settings: GatewaySettings, workflows: Workflows, log: Logger
) -> AsyncIterator[WorkflowChanges]:
    """Workflows are shared with the gateways with which this one shares its jobs."""
    copied = Path(settings.state_dir) / _COPIED
    shared = jetstream_settings(settings)
    if shared is None:
        copied.unlink(missing_ok=True)
        yield workflows
        return
    stream = WorkflowStream(shared, workflows, copied, log)
    try:
        await stream.open()
        yield stream
    finally:
        await stream.close()
