"""Builds the async calls of one gateway: the queue, its workers, and their two applications."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from logging import Logger

from common.http.asgi import App, Receive, Scope, Send
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.jobs.dead_letter_expiry import expiring
from gateway_ext.jobs.execution.invoke_calls import InvokeCalls
from gateway_ext.jobs.execution.job_worker import JobWorker, JobWorkerSettings
from gateway_ext.jobs.execution.lane_fairness import LaneLimits
from gateway_ext.jobs.execution.retry_policy import RetryPolicy
from gateway_ext.jobs.intake.async_intake import AsyncIntake
from gateway_ext.jobs.intake.callback_addresses import CallbackRule
from gateway_ext.jobs.job_meters import JobMeters
from gateway_ext.jobs.job_routes import make_job_routes
from gateway_ext.jobs.queue.job_queue import JobQueue
from gateway_ext.jobs.queue_choice import open_queue
from gateway_ext.model import FunctionId
from gateway_ext.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class AsyncJobs:
    """The running parts; `app` serves /async-function and /system/jobs."""

    app: App
    queue: JobQueue
    meters: JobMeters


@asynccontextmanager
async def jobs_of(
    settings: GatewaySettings,
    functions: Functions,
    invoke: Invoke,
    log: Logger,
    own: tuple[str, int] | None = None,
) -> AsyncIterator[AsyncJobs]:
    """Open the configured queue and run its jobs until the context exits; `own` is our address."""
    rule = CallbackRule(
        private=settings.callback_private, allowed=settings.callback_allowed, own=own
    )
    queue = await open_queue(settings, log)
    try:
        worker = JobWorker(
            queue,
            InvokeCalls(invoke),
            lambda function: _attempts(functions, function),
            _worker_settings(settings, rule),
            log,
            invoke.tracer,
        )
        async with worker, expiring(queue, log):
            app = _app(settings, functions, queue, worker, invoke, rule)
            yield AsyncJobs(app, queue, JobMeters(queue, worker.endings))
    finally:
        await queue.close()


def _app(
    settings: GatewaySettings,
    functions: Functions,
    queue: JobQueue,
    worker: JobWorker,
    invoke: Invoke,
    rule: CallbackRule,
) -> App:
    intake = AsyncIntake(
        functions.by_path,
        queue,
        max_body_bytes=settings.async_max_body_bytes,
        body_s=settings.async_body_s,
        callback_rule=rule,
        is_ours=invoke.guard.is_ours,
        tracer=invoke.tracer,
    )
    routes = make_job_routes(queue, lambda: worker.running, time.time)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inner = routes if scope["path"].startswith("/system/") else intake
        await inner(scope, receive, send)

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
    )


def _attempts(functions: Functions, function: FunctionId) -> int | None:
    """The attempts in a function's options: the first one and its `retries`; None: the default."""
    known = functions.by_id(function)
    if known is None or known.options.retries is None:
        return None
    return known.options.retries + 1
