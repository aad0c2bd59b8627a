"""The routes /system/workflows and /system/workflow/NAME: deploy, list, describe, remove, runs."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from common.http.asgi import App
from gateway_ext.bounded_json import decoded
from gateway_ext.calls.function_table import Functions
from gateway_ext.errors import BadRequest, GatewayError
from gateway_ext.features import Rows
from gateway_ext.metrics import BOUNDS_S, GatewayMeters
from gateway_ext.openfaas import valid_names
from gateway_ext.openfaas.json_answers import body_of, disk_failed, done, failed, route, shown
from gateway_ext.workflows.errors import BadWorkflowFile
from gateway_ext.workflows.history import RunHistory
from gateway_ext.workflows.plan import PlannedStage, WorkflowId, WorkflowPlan, read_workflow
from gateway_ext.workflows.table import WorkflowChanges, Workflows

_log = logging.getLogger(__name__)


class _Removal(msgspec.Struct, rename="camel"):
    workflow_name: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class WorkflowRoutes:
    """What is behind the paths of workflows below /system."""

    workflows: Workflows
    changes: WorkflowChanges
    functions: Functions
    history: RunHistory
    times: GatewayMeters

    def app(self) -> App:
        """The application; it checks no credentials."""
        app = Starlette(
            routes=[
                route("/system/workflows", GET=self.list, POST=partial(self.deploy, update=False),
                       PUT=partial(self.deploy, update=True), DELETE=self.remove),
                route("/system/workflow/{name}", GET=self.show),
                route("/system/workflow/{name}/runs", GET=self.runs),
            ],
            exception_handlers={GatewayError: failed, OSError: disk_failed},
        )  # fmt: skip
        app.router.redirect_slashes = False
        return app

    async def list(self, request: Request) -> Response:
        namespace = valid_names.namespace_or_default(request.query_params.get("namespace", ""))
        plans = self.workflows.of_namespace(namespace)
        return shown([summary(plan) for plan in plans])

    async def show(self, request: Request) -> Response:
        plan = self.workflows.by_id(_workflow(request))
        possible_s = fastest_s(plan, self._least_s(plan))
        return shown(description(plan, self.history.mean_s(plan), possible_s))

    async def runs(self, request: Request) -> Response:
        workflow = self.workflows.by_id(_workflow(request)).id
        return shown({"runs": [run.shown() for run in self.history.runs(workflow)]})

    async def deploy(self, request: Request, *, update: bool) -> Response:
        try:
            text = (await body_of(request)).decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"the file is not UTF-8: {error}") from error
        deployed = frozenset(function.id for function in self.functions)
        plan = await asyncio.to_thread(read_workflow, text, deployed.__contains__)
        require_slo(plan, self._least_s(plan))
        await self.changes.deploy(plan, update=update)
        _log.info("%s the workflow %s", "updated" if update else "deployed", plan.id)
        return done()

    async def remove(self, request: Request) -> Response:
        sent = decoded(await body_of(request), _Removal)
        namespace = request.query_params.get("namespace", "") or sent.namespace
        workflow = valid_names.function_id(sent.workflow_name, namespace)
        await self.changes.remove(WorkflowId(*workflow))
        _log.info("removed the workflow %s", workflow)
        return done()

    def _least_s(self, plan: WorkflowPlan) -> Mapping[str, float]:
        names = {str(stage.function) for stage in plan.stages.values()}
        return least_times(self.times.seconds(names), BOUNDS_S)


def _workflow(request: Request) -> WorkflowId:
    namespace = request.query_params.get("namespace", "")
    return WorkflowId(*valid_names.function_id(request.path_params["name"], namespace))


# Whether a workflow can keep its SLO, by the fastest calls of its functions so far.
# Times are known as buckets of a histogram: a function has never been faster than the lower bound
# of the first bucket that is not empty. Of few calls too little is known.

LEAST_CALLS = 20


def fastest_s(plan: WorkflowPlan, least_s: Mapping[str, float]) -> float:
    """The shortest time that the workflow can take; functions without a known time take none.

    `least_s` has the shortest time of functions, by their names. Stages that have a condition may
    be skipped, and take none either.
    """
    weights = {
        name: 0.0 if stage.when is not None else least_s.get(str(stage.function), 0.0)
        for name, stage in plan.stages.items()
    }
    return max(plan.graph.longest(weights).values())


def require_slo(plan: WorkflowPlan, least_s: Mapping[str, float]) -> None:
    """BadWorkflowFile with the shortest possible time, if it exceeds the SLO."""
    possible_s = fastest_s(plan, least_s)
    if plan.slo_s is not None and possible_s > plan.slo_s:
        raise BadWorkflowFile(
            f"workflow {plan.id} cannot end within {plan.slo_s:g} s: the fastest calls of its "
            f"functions took more than {possible_s:g} s together"
        )


def least_times(
    counts: Mapping[str, Sequence[int]], bounds_s: Sequence[float]
) -> Mapping[str, float]:
    """The time below which no call of a function has ever been, of functions with enough calls."""
    least_s = {}
    for function, numbers in counts.items():
        if sum(numbers) >= LEAST_CALLS:
            first = next(at for at, number in enumerate(numbers) if number)
            least_s[function] = bounds_s[first - 1] if first else 0.0
    return least_s


def summary(plan: WorkflowPlan) -> dict[str, Any]:
    return {
        "name": plan.id.name,
        "namespace": plan.id.namespace,
        "stages": len(plan.stages),
        "sloMs": _ms(plan.slo_s),
    }


def description(
    plan: WorkflowPlan, mean_s: Mapping[str, float], fastest_s: float
) -> dict[str, Any]:
    """All that is known of a workflow; `share` is a stage's part of the time of all of them."""
    total_s = sum(mean_s.values())
    return {
        "name": plan.id.name,
        "namespace": plan.id.namespace,
        "sloMs": _ms(plan.slo_s),
        "timeoutMs": _ms(plan.timeout_s),
        "fastestMs": _ms(fastest_s),
        "text": plan.text,
        "stages": [
            _stage(plan.stages[name], mean_s.get(name), total_s) for name in plan.graph.order
        ],
    }


def _stage(stage: PlannedStage, mean_s: float | None, total_s: float) -> dict[str, Any]:
    return {
        "name": stage.name,
        "function": stage.function.name,
        "after": list(stage.sources),
        "when": "" if stage.when is None else stage.when.text,
        "retries": stage.retries,
        "timeoutMs": _ms(stage.timeout_s),
        "optional": stage.optional,
        "byHandle": stage.by_handle,
        "each": stage.each,
        "meanMs": _ms(mean_s),
        "share": None if mean_s is None or not total_s else round(mean_s / total_s, 4),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


_MOST_ROWS = 50


class WorkflowRows:
    """The workflows as the gateway's page shows them, with what their last runs took."""

    def __init__(self, workflows: Workflows, history: RunHistory) -> None:
        self._workflows = workflows
        self._history = history
        self._seen = (-1, -1)
        self._shown: Rows = ()

    def look(self) -> Rows:
        """The first workflows by name; the same object while nothing has changed."""
        now = (self._workflows.changes, self._history.changes)
        if now != self._seen:
            self._seen = now
            plans = [plan for plan, _ in zip(self._workflows, range(_MOST_ROWS), strict=False)]
            self._shown = [self._row(plan) for plan in plans]
        return self._shown

    def _row(self, plan: WorkflowPlan) -> Mapping[str, Any]:
        runs = list(self._history.runs(plan.id))
        ended = [run for run in runs if run.ended_s]
        took_s = sorted(run.ended_s - run.began_s for run in ended)
        return {
            "id": str(plan.id),
            "name": plan.id.name,
            "namespace": plan.id.namespace,
            "slo_s": plan.slo_s,
            "runs": len(ended),
            "running": len(runs) - len(ended),
            "missed": sum(run.slo == "missed" for run in ended),
            "median_s": took_s[len(took_s) // 2] if took_s else None,
            "last": ended[0].status if ended else None,
            "why": ended[0].why if ended else "",
            "stages": self._stages(plan),
        }

    def _stages(self, plan: WorkflowPlan) -> Rows:
        """In an order in which each comes after those it waits for; `level` is its column."""
        mean_s = self._history.mean_s(plan)
        total_s = sum(mean_s.values())
        level: dict[str, int] = {}
        stages = []
        for name in plan.graph.order:
            before = plan.graph.before(name)
            level[name] = 1 + max((level[stage] for stage in before), default=-1)
            known_s = mean_s.get(name)
            stages.append(
                {
                    "name": name,
                    "function": plan.stages[name].function.name,
                    "after": list(before),
                    "level": level[name],
                    "mean_s": known_s,
                    "share": None if known_s is None or not total_s else known_s / total_s,
                }
            )
        return stages
