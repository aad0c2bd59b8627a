"""The workflows of one gateway: their table, their runs, their routes, and jobs of them."""

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from common.http.asgi import (
    Header,
    Receive,
    Scope,
    Send,
    announced_bytes,
    header_in,
    send_text,
    until_disconnected,
)
from common.tasks import until_first
from gateway_ext.calls.invoke import StreamedResponse
from gateway_ext.calls.passed_headers import CALL_ID, DURATION, START_TIME, BrowserGuard, call_id_in
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import BadRequest, CallerGone, GatewayError, TooLarge, WrongMethod
from gateway_ext.features import Hooks
from gateway_ext.jobs.intake import read_body
from gateway_ext.jobs.values import AsyncCall, StoredBody, whole
from gateway_ext.model import DEFAULT_NAMESPACE, FunctionId
from gateway_ext.workflows.errors import UnknownWorkflow
from gateway_ext.workflows.history import RunHistory, WorkflowMeters
from gateway_ext.workflows.limits import RunLimits, RunShare
from gateway_ext.workflows.plan import WorkflowId, WorkflowPlan
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


PREFIX = b"/workflow/"

_OURS = frozenset({CALL_ID, START_TIME, DURATION})


@dataclass(frozen=True, slots=True)
class WorkflowIntake:
    """The ASGI application of /workflow/."""

    workflows: Workflows
    calls: WorkflowCalls
    guard: BrowserGuard
    body_s: float  # in which a body must arrive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves ends the run."""
        with self.calls.limits.share() as share:
            try:
                plan = self._plan(scope)
                body = await self._body(scope, receive, share)
            except CallerGone:
                return
            except GatewayError as error:
                await send_text(send, status_of(error), str(error), headers_of(error))
                return
            run = self._respond(plan, scope, body, share, send)
            await until_first(run, until_disconnected(receive))

    async def _respond(
        self, plan: WorkflowPlan, scope: Scope, body: bytes, share: RunShare, send: Send
    ) -> None:
        headers = _with_client(scope)
        call_id = call_id_in(header_in(scope, CALL_ID)).decode("latin-1") or str(uuid4())
        own = (CALL_ID, call_id.encode("latin-1"))
        began_s, started = time.monotonic(), (START_TIME, b"%d" % time.time_ns())
        begun = False
        try:
            async with self.calls.call(
                plan, call_id, headers, scope["query_string"], body, share
            ) as answer:
                start = {"type": "http.response.start", "status": answer.status}
                shown = [header for header in answer.headers if header[0] not in _OURS]
                host = header_in(scope, b"host")
                took = (DURATION, b"%.6f" % (time.monotonic() - began_s))
                site = scope.get("raw_path") or scope["path"].encode()
                confined = self.guard.confine([*shown, own, started, took], host, site)
                begun = True
                await send({**start, "headers": confined})
                await _send_body(answer, send)
        except GatewayError as error:
            if not begun:  # else the answer is cut off, which tells the client
                await send_text(send, status_of(error), str(error), [*headers_of(error), own])

    def _plan(self, scope: Scope) -> WorkflowPlan:
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        name = raw.removeprefix(PREFIX)
        plan = self.workflows.by_path(name)
        if plan is None:
            if not name:
                raise BadRequest("the path names no workflow: it is /workflow/NAME")
            short, _, namespace = name.decode("latin-1").partition(".")
            raise UnknownWorkflow(namespace or DEFAULT_NAMESPACE, short)
        if scope["method"] != "POST":
            raise WrongMethod(scope["method"])
        return plan

    async def _body(self, scope: Scope, receive: Receive, share: RunShare) -> bytes:
        most_bytes = self.calls.limits.answer_bytes
        if announced_bytes(scope) > most_bytes:
            raise TooLarge(most_bytes)
        parts = bytearray()

        async def take(piece: bytes) -> None:
            share.hold(len(piece))  # bodies of many calls at once would fill the memory
            parts.extend(piece)

        await read_body(receive, take, most_bytes, self.body_s)
        return bytes(parts)


async def _send_body(answer: StreamedResponse, send: Send) -> None:
    # A write of no bytes sends the head at once.
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    async for piece in answer.body:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _with_client(scope: Scope) -> list[Header]:
    """The request's headers, with the client among those for whom it is forwarded."""
    headers: list[Header] = list(scope["headers"])
    client = scope.get("client")
    return [*headers, (b"x-forwarded-for", client[0].encode("latin-1"))] if client else headers
