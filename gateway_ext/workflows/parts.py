"""Builds the workflows of one gateway: their table, their runs, their routes, and jobs of them."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from logging import Logger
from pathlib import Path

from common.http.asgi import App
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import PREFIX, Invoke, Streamed, StreamedResponse, close_body
from gateway_ext.errors import TooLarge, UnknownWorkflow
from gateway_ext.jobs.parts import JobTargets, jetstream_settings
from gateway_ext.jobs.values import AsyncCall, StoredBody, whole
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import FunctionId
from gateway_ext.openfaas.system_routes import NamespaceRemoved
from gateway_ext.settings import GatewaySettings
from gateway_ext.workflows.history import RunHistory, WorkflowMeters
from gateway_ext.workflows.intake import WorkflowIntake
from gateway_ext.workflows.limits import RunLimits
from gateway_ext.workflows.plan import WorkflowId
from gateway_ext.workflows.routes import WorkflowChanges, make_workflow_routes
from gateway_ext.workflows.runs import WorkflowCalls
from gateway_ext.workflows.stream import WorkflowStream
from gateway_ext.workflows.table import Workflows

_FOLDER = "workflows"
# Names the stream of which the folder is a copy; without it the folder is this gateway's own.
_COPIED = "workflows.copied"


@dataclass(frozen=True, slots=True)
class WorkflowParts:
    """The running parts of workflows."""

    app: App  # /workflow
    routes: App  # below /system
    targets: JobTargets
    workflows: Workflows
    history: RunHistory
    namespace_removed: NamespaceRemoved  # removes the workflows of a namespace


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
                workflow_by_path=partial(_target, workflows),
                calls=JobTargetCalls(invoke, workflows, calls),
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


# A job's target is a function's id. That of a workflow has a name that no function can have.
_MARK = "workflow:"
# A body in memory can be sent to another instance if the first one breaks off.
_HELD_BYTES = 1 << 20


def _target(workflows: Workflows, name: bytes) -> FunctionId | None:
    """What stands in jobs for the workflow that a path names."""
    plan = workflows.by_path(name)
    return None if plan is None else FunctionId(plan.id.namespace, _MARK + plan.id.name)


class JobTargetCalls:
    """See `FunctionCalls`: runs the workflow that a job names, or calls its function."""

    def __init__(self, invoke: Invoke, workflows: Workflows, calls: WorkflowCalls) -> None:
        self._invoke = invoke
        self._workflows = workflows
        self._calls = calls

    def call(
        self, call: AsyncCall, body: StoredBody
    ) -> AbstractAsyncContextManager[StreamedResponse]:
        if call.function.name.startswith(_MARK):
            return self._run(call, body)
        return self._call(call, body)

    @asynccontextmanager
    async def _call(self, call: AsyncCall, body: StoredBody) -> AsyncIterator[StreamedResponse]:
        path = PREFIX.encode() + str(call.function).encode() + call.path
        headers = [*call.headers, (b"x-call-id", call.id.encode("latin-1"))]
        small = body.size_bytes <= _HELD_BYTES
        content: bytes | Streamed = (
            await whole(body) if small else Streamed(body.size_bytes, body.pieces())
        )
        answer = await self._invoke.direct(call.method, path, call.query, headers, content)
        try:
            yield answer
        finally:
            await close_body(answer.body)

    @asynccontextmanager
    async def _run(self, call: AsyncCall, body: StoredBody) -> AsyncIterator[StreamedResponse]:
        namespace, name = call.function
        plan = self._workflows.by_id(WorkflowId(namespace, name.removeprefix(_MARK)))
        most_bytes = self._calls.limits.answer_bytes
        if body.size_bytes > most_bytes:
            raise TooLarge(most_bytes)
        with self._calls.limits.share() as share:
            share.hold(body.size_bytes)
            content = await whole(body)
            running = self._calls.call(plan, call.id, call.headers, call.query, content, share)
            async with running as answer:
                yield answer
