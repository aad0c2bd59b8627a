"""Builds the async calls of one gateway: the queue, its workers, and their two applications."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from logging import Logger

from common.http.asgi import App, Receive, Scope, Send
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.jobs.dead_letter_expiry import expiring
from gateway_ext.jobs.execution.function_calls import FunctionCalls
from gateway_ext.jobs.execution.job_worker import JobWorker, JobWorkerSettings
from gateway_ext.jobs.execution.lane_fairness import LaneLimits
from gateway_ext.jobs.execution.retry_policy import RetryPolicy
from gateway_ext.jobs.intake.async_intake import AsyncIntake, AsyncWorkflowIntake
from gateway_ext.jobs.intake.callback_addresses import CallbackRule
from gateway_ext.jobs.job_meters import JobMeters
from gateway_ext.jobs.job_routes import make_job_routes
from gateway_ext.jobs.queue.job_queue import JobQueue
from gateway_ext.jobs.queue_choice import open_queue
from gateway_ext.model import FunctionId
from gateway_ext.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class AsyncJobs:
    """The running parts; `app` serves /async-function, /async-workflow and /system/jobs."""

    app: App
    queue: JobQueue
    meters: JobMeters


@dataclass(frozen=True, slots=True)
class JobTargets:
    """What jobs may call: how it is found by the name in a path, and how it is called."""

    function_by_path: Callable[[bytes], FunctionId | None]
    workflow_by_path: Callable[[bytes], FunctionId | None]
    calls: FunctionCalls


@asynccontextmanager
async def jobs_of(
    settings: GatewaySettings,
    functions: Functions,
    invoke: Invoke,
    targets: JobTargets,
    log: Logger,
    own: tuple[str, int] | None = None,
) -> AsyncIterator[AsyncJobs]:
    """Open the configured queue and run its jobs until the context exits; `own` is our address."""
    rule = CallbackRule(allowed=settings.callback_allowed, own=own)
    queue = await open_queue(settings, log)
    try:
        worker = JobWorker(
            queue,
            targets.calls,
            lambda function: _attempts(functions, function),
            _worker_settings(settings, rule),
            log,
            invoke.tracer,
        )
        async with worker, expiring(queue, log):
            app = _app(settings, targets, queue, worker, invoke, rule)
            yield AsyncJobs(app, queue, JobMeters(queue, worker.endings))
    finally:
        await queue.close()


def _app(
    settings: GatewaySettings,
    targets: JobTargets,
    queue: JobQueue,
    worker: JobWorker,
    invoke: Invoke,
    rule: CallbackRule,
) -> App:
    def intake(
        kind: type[AsyncIntake],
        by_path: Callable[[bytes], FunctionId | None],
        most_bytes: int,
    ) -> AsyncIntake:
        return kind(
            by_path,
            queue,
            max_body_bytes=most_bytes,
            callback_rule=rule,
            is_ours=invoke.guard.is_ours,
            tracer=invoke.tracer,
        )

    most_bytes = settings.async_max_body_bytes
    calls = intake(AsyncIntake, targets.function_by_path, most_bytes)
    workflow_bytes = min(most_bytes, settings.workflow_answer_bytes)
    workflows = intake(AsyncWorkflowIntake, targets.workflow_by_path, workflow_bytes)
    routes = make_job_routes(queue, lambda: worker.running, queue.now_s)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith("/system/"):
            await routes(scope, receive, send)
        elif path.startswith(AsyncWorkflowIntake.prefix.decode()):
            await workflows(scope, receive, send)
        else:
            await calls(scope, receive, send)

    return app


def _worker_settings(settings: GatewaySettings, rule: CallbackRule) -> JobWorkerSettings:
    patience = RetryPolicy(attempts=settings.async_attempts)
    overall = settings.async_concurrency
    usual = JobWorkerSettings()
    return replace(
        usual,
        calls=LaneLimits(overall=overall, per_lane=max(1, overall // 2)),
        patience=patience,
        callback_patience=patience,
        callback_rule=rule,
        callback_s=settings.callback_s,
    )


def _attempts(functions: Functions, function: FunctionId) -> int | None:
    """The attempts in a function's options: the first one and its `retries`; None: the default."""
    known = functions.by_id(function)
    if known is None or known.options.retries is None:
        return None
    return known.options.retries + 1
