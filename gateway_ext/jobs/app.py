"""Jobs of one gateway, put together: the queue, its workers, and their two applications."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from logging import Logger

from gateway_ext.asgi import App, Receive, Scope, Send
from gateway_ext.invoke import Invoke
from gateway_ext.jobs.choosing import open_queue
from gateway_ext.jobs.expiring import expiring
from gateway_ext.jobs.fairness import Limits
from gateway_ext.jobs.intake import Intake
from gateway_ext.jobs.job_meters import JobMeters
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.retry import Patience
from gateway_ext.jobs.routes import make_job_routes
from gateway_ext.jobs.through_invoke import ThroughInvoke
from gateway_ext.jobs.worker import Worker, WorkerSettings
from gateway_ext.model import FunctionId
from gateway_ext.settings import GatewaySettings
from gateway_ext.table import Functions
from gateway_ext.tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Jobs:
    """`app` answers /async-function and /system/jobs."""

    app: App
    queue: JobQueue
    meters: JobMeters


@asynccontextmanager
async def jobs_of(
    settings: GatewaySettings, functions: Functions, invoke: Invoke, log: Logger
) -> AsyncIterator[Jobs]:
    """Open the queue that the settings ask for and work it off, until this is left."""
    queue = await open_queue(settings, log)
    try:
        worker = Worker(
            queue,
            ThroughInvoke(invoke),
            lambda function: _attempts(functions, function),
            _worker_settings(settings),
            log,
            invoke.tracer,
        )
        async with worker, expiring(queue, log):
            app = _app(settings, functions, queue, worker, invoke.tracer)
            yield Jobs(app, queue, JobMeters(queue, worker.endings))
    finally:
        await queue.close()


def _app(
    settings: GatewaySettings,
    functions: Functions,
    queue: JobQueue,
    worker: Worker,
    tracer: Tracer,
) -> App:
    intake = Intake(
        functions.by_path,
        queue,
        max_body_bytes=settings.async_max_body_bytes,
        body_s=settings.async_body_s,
        callback_private=settings.callback_private,
        tracer=tracer,
    )
    routes = make_job_routes(queue, lambda: worker.running, time.time)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inner = routes if scope["path"].startswith("/system/") else intake
        await inner(scope, receive, send)

    return app


def _worker_settings(settings: GatewaySettings) -> WorkerSettings:
    patience = Patience(attempts=settings.async_attempts)
    overall = settings.async_concurrency
    usual = WorkerSettings()
    return replace(
        usual,
        calls=Limits(overall=overall, per_lane=max(1, overall // 2)),
        patience=patience,
        callback_patience=patience,
        callback_private=settings.callback_private,
    )


def _attempts(functions: Functions, function: FunctionId) -> int | None:
    """`retries` come after the first attempt."""
    known = functions.by_id(function)
    if known is None or known.wishes.retries is None:
        return None
    return known.wishes.retries + 1
