"""The routes /system/workflows and /system/workflow/NAME: deploy, list, describe, remove, runs."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from common.http.asgi import App
from gateway_ext.calls.function_table import Functions
from gateway_ext.errors import BadRequest, GatewayError
from gateway_ext.metrics.call_counts import BOUNDS_S, GatewayMeters
from gateway_ext.openfaas import valid_names
from gateway_ext.openfaas.json_answers import body_of, disk_failed, done, failed, route, shown
from gateway_ext.openfaas.json_fields import Fields
from gateway_ext.workflows import workflow_json
from gateway_ext.workflows.plan.fastest_times import fastest_s, least_times, require_slo
from gateway_ext.workflows.plan.workflow_file import read_workflow
from gateway_ext.workflows.plan.workflow_values import WorkflowId, WorkflowPlan
from gateway_ext.workflows.run.run_history import RunHistory
from gateway_ext.workflows.workflow_table import Workflows

_log = logging.getLogger(__name__)


class WorkflowChanges(Protocol):
    """Changes the workflows: those of one gateway, or of all that share them."""

    async def deploy(self, plan: WorkflowPlan, *, update: bool) -> None:
        """Store a workflow, and replace one of that name, which must exist with `update`."""
        ...

    async def remove(self, workflow: WorkflowId) -> None:
        """Remove a workflow; its runs under way go on."""
        ...


def make_workflow_routes(
    workflows: Workflows,
    changes: WorkflowChanges,
    functions: Functions,
    history: RunHistory,
    times: GatewayMeters,
) -> App:
    """The application for all paths of workflows below /system; it checks no credentials."""
    routes = _Routes(workflows, changes, functions, history, times)
    app = Starlette(
        routes=[
            route("/system/workflows", GET=routes.list, POST=routes.create,
                   PUT=routes.update, DELETE=routes.remove),
            route("/system/workflow/{name}", GET=routes.show),
            route("/system/workflow/{name}/runs", GET=routes.runs),
        ],
        exception_handlers={GatewayError: failed, OSError: disk_failed},
    )  # fmt: skip
    app.router.redirect_slashes = False
    return app


class _Routes:
    def __init__(
        self,
        workflows: Workflows,
        changes: WorkflowChanges,
        functions: Functions,
        history: RunHistory,
        times: GatewayMeters,
    ) -> None:
        self._workflows = workflows
        self._changes = changes
        self._functions = functions
        self._history = history
        self._times = times

    async def list(self, request: Request) -> Response:
        namespace = valid_names.namespace_or_default(request.query_params.get("namespace", ""))
        found = self._workflows.of_namespace(namespace)
        return shown([workflow_json.summary(plan) for plan in found])

    async def show(self, request: Request) -> Response:
        plan = self._workflows.by_id(_workflow(request))
        possible_s = fastest_s(plan, self._least_s(plan))
        return shown(workflow_json.description(plan, self._history.mean_s(plan), possible_s))

    async def runs(self, request: Request) -> Response:
        workflow = self._workflows.by_id(_workflow(request)).id
        return shown({"runs": [run.shown() for run in self._history.runs(workflow)]})

    async def create(self, request: Request) -> Response:
        return await self._deploy(request, update=False)

    async def update(self, request: Request) -> Response:
        return await self._deploy(request, update=True)

    async def _deploy(self, request: Request, *, update: bool) -> Response:
        try:
            text = (await body_of(request)).decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"the file is not UTF-8: {error}") from error
        known = frozenset(function.id for function in self._functions)
        plan = await asyncio.to_thread(read_workflow, text, known.__contains__)
        require_slo(plan, self._least_s(plan))
        await self._changes.deploy(plan, update=update)
        _log.info("%s the workflow %s", "updated" if update else "deployed", plan.id)
        return done()

    async def remove(self, request: Request) -> Response:
        fields = Fields.of(await body_of(request))
        namespace = request.query_params.get("namespace", "") or fields.text("namespace")
        workflow = valid_names.function_id(fields.required("workflowName"), namespace)
        await self._changes.remove(WorkflowId(*workflow))
        _log.info("removed the workflow %s", workflow)
        return done()

    def _least_s(self, plan: WorkflowPlan) -> Mapping[str, float]:
        names = {str(stage.function) for stage in plan.stages.values()}
        return least_times(self._times.seconds(names), BOUNDS_S)


def _workflow(request: Request) -> WorkflowId:
    namespace = request.query_params.get("namespace", "")
    return WorkflowId(*valid_names.function_id(request.path_params["name"], namespace))
