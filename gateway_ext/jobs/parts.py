"""Builds the async calls of one gateway: the queue that it is set to, its workers, its routes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from logging import Logger
from pathlib import Path

from common.http.asgi import App, Receive, Scope, Send
from common.telemetry.metrics import BoundedNames, Labels, MetricFamily, gauge
from gateway_ext import metrics
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.attempts import RetryPolicy
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.caller import FunctionCalls
from gateway_ext.jobs.intake import AsyncIntake
from gateway_ext.jobs.jetstream.queue import JetStreamQueue
from gateway_ext.jobs.jetstream.settings import JetStreamSettings, check, servers_in
from gateway_ext.jobs.queue import JobQueue, QueueLimits, opened
from gateway_ext.jobs.routes import make_job_routes
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.values import JobKind
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings, LaneLimits
from gateway_ext.model import FunctionId
from gateway_ext.settings import GatewaySettings


def job_families(
    queue: JobQueue, endings: Mapping[tuple[JobKind, str], int], functions: BoundedNames
) -> Iterator[MetricFamily]:
    """Queued calls by function, and how attempts ended; `functions` bounds the label values."""
    tally = queue.tally
    queued: list[tuple[Labels, float]] = [((function,), 0.0) for function in functions]
    for function, count in tally.calls.items():
        queued.append(((functions.of(str(function)),), count))
    yield gauge(metrics.JOBS_QUEUED, queued)
    since_s = tally.oldest_queued_at_s
    oldest_s = 0.0 if since_s is None else max(0.0, queue.now_s() - since_s)
    yield gauge(metrics.JOBS_OLDEST, [((), oldest_s)])
    yield gauge(metrics.JOB_CALLBACKS, [((), tally.callbacks)])
    yield gauge(metrics.JOBS_DEAD, [((), tally.dead)])
    yield gauge(metrics.JOBS_AWAY, [((), float(queue.away))])
    ended = [((kind.name.lower(), outcome), count) for (kind, outcome), count in endings.items()]
    yield gauge(metrics.JOB_ATTEMPTS, ended)


@dataclass(frozen=True, slots=True)
class AsyncJobs:
    """The running parts; `app` serves /async-function, /async-workflow and /system/jobs."""

    app: App
    queue: JobQueue
    families: Callable[[BoundedNames], Iterator[MetricFamily]]


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
            yield AsyncJobs(
                app, queue, lambda functions: job_families(queue, worker.endings(), functions)
            )
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
    most_bytes = settings.async_max_body_bytes
    intake = partial(
        AsyncIntake,
        queue=queue,
        callback_rule=rule,
        is_ours=invoke.guard.is_ours,
        tracer=invoke.tracer,
    )
    calls = intake(targets.function_by_path, max_body_bytes=most_bytes)
    workflows = intake(
        targets.workflow_by_path,
        what="workflow",
        max_body_bytes=min(most_bytes, settings.workflow_answer_bytes),
    )
    routes = make_job_routes(queue, lambda: worker.running)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith("/system/"):
            await routes(scope, receive, send)
        elif path.startswith("/async-workflow/"):
            await workflows(scope, receive, send)
        else:
            await calls(scope, receive, send)

    return app


def _worker_settings(settings: GatewaySettings, rule: CallbackRule) -> JobWorkerSettings:
    patience = RetryPolicy(attempts=settings.async_attempts)
    overall = settings.async_concurrency
    return JobWorkerSettings(
        calls=LaneLimits(overall=overall, per_lane=max(1, overall // 2)),
        patience=patience,
        callback_rule=rule,
        callback_s=settings.callback_s,
    )


def _attempts(functions: Functions, function: FunctionId) -> int | None:
    """The attempts in a function's options: the first one and its `retries`; None: the default."""
    deployed = functions.by_id(function)
    if deployed is None or deployed.options.retries is None:
        return None
    return deployed.options.retries + 1


_EVERY_S = 60.0


@asynccontextmanager
async def expiring(
    queue: JobQueue, log: Logger, every_s: float = _EVERY_S
) -> AsyncIterator[asyncio.Task[None]]:
    """Remove expired dead letters every `every_s` until the context exits."""
    looking = asyncio.create_task(_keep_looking(queue, log, every_s), name="dead letters")
    try:
        yield looking
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _keep_looking(queue: JobQueue, log: Logger, every_s: float) -> None:
    while True:
        try:
            count = await queue.expire(queue.now_s())
        except QueueFailed as error:
            log.warning("expired dead letters are not removed: %s", error)
        else:
            if count:
                log.info("%d expired dead letters were removed", count)
        await asyncio.sleep(every_s)


_SQLITE = "sqlite"
_DAY_S = 24 * 3600.0


def check_queue(settings: GatewaySettings) -> None:
    """Raise BadRequest where the settings of the queue are invalid."""
    shared = jetstream_settings(settings)
    if shared is not None:
        check(shared)


async def open_queue(settings: GatewaySettings, log: Logger) -> JobQueue:
    """A server that is away is retried in the background. The caller closes the queue."""
    folder = Path(settings.state_dir)
    limits = QueueLimits(
        body_bytes=settings.async_max_body_bytes,
        waiting_per_function=settings.async_max_waiting,
        waiting_bytes=settings.async_max_waiting_bytes,
        dead_bytes=settings.async_dead_bytes,
        dead_age_s=settings.async_dead_days * _DAY_S,
    )
    shared = jetstream_settings(settings)
    if shared is None:
        return await opened(SqliteQueue(folder / "jobs", limits, log))
    return await opened(JetStreamQueue(folder / "jobs-nats", shared, limits, log))


def jetstream_settings(settings: GatewaySettings) -> JetStreamSettings | None:
    """The servers that gateways share; None: this gateway keeps all it knows in files."""
    if settings.queue == _SQLITE:
        return None
    return JetStreamSettings(
        servers=servers_in(settings.queue),
        user=settings.queue_user,
        password_file=settings.queue_password_file,
        ca_file=settings.queue_ca_file,
        cert_file=settings.queue_cert_file,
        key_file=settings.queue_key_file,
        replicas=settings.queue_replicas,
        prefix=settings.queue_prefix,
    )
