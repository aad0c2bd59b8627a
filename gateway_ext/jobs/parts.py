"""Builds the async calls of one gateway: the queue that it is set to, its workers, its routes."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from logging import Logger
from pathlib import Path

from common.telemetry.metrics import BoundedNames, Labels, MetricFamily, gauge
from gateway_ext import metrics
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import PREFIX, Invoke, Streamed, StreamedResponse, close_body
from gateway_ext.errors import Unknown
from gateway_ext.jobs.attempts import RetryPolicy
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.caller import FunctionCalls
from gateway_ext.jobs.intake import AsyncIntake
from gateway_ext.jobs.queue import JobQueue, QueueLimits, opened
from gateway_ext.jobs.shared import SharedStore
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.values import AsyncCall, StoredBody, whole
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings, LaneLimits
from gateway_ext.model import FunctionId
from gateway_ext.settings import GatewaySettings


def job_families(
    queue: JobQueue, worker: JobWorker, functions: BoundedNames
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
    ended = [
        ((kind.name.lower(), outcome), count) for (kind, outcome), count in worker.endings().items()
    ]
    yield gauge(metrics.JOB_ATTEMPTS, ended)


def opened_queue(
    settings: GatewaySettings, shared: SharedStore | None, log: Logger
) -> AbstractAsyncContextManager[JobQueue]:
    """The queue, `shared` or of this gateway alone; one that is away is retried meanwhile."""
    folder = Path(settings.state_dir)
    limits = QueueLimits(
        body_bytes=settings.async_max_body_bytes,
        waiting_per_function=settings.async_max_waiting,
        waiting_bytes=settings.async_max_waiting_bytes,
        dead_bytes=settings.async_dead_bytes,
        dead_age_s=settings.async_dead_days * _DAY_S,
    )
    if shared is None:
        return opened(SqliteQueue(folder / "jobs", limits, log))
    return opened(shared.queue(folder, limits, log))


def job_intake(queue: JobQueue, invoke: Invoke, rule: CallbackRule) -> partial[AsyncIntake]:
    """What takes async calls: of what `by_path` finds, with bodies of `max_body_bytes`."""
    return partial(
        AsyncIntake,
        queue=queue,
        callback_rule=rule,
        is_ours=invoke.guard.is_ours,
        tracer=invoke.tracer,
    )


def jobs_of(
    settings: GatewaySettings,
    functions: Functions,
    invoke: Invoke,
    queue: JobQueue,
    rule: CallbackRule,
    others: Mapping[str, FunctionCalls],
    log: Logger,
) -> JobWorker:
    """What runs the jobs of an open queue, as a context; see `TargetCalls` for `others`."""
    overall = settings.async_concurrency
    worker = JobWorkerSettings(
        calls=LaneLimits(overall=overall, per_lane=max(1, overall // 2)),
        patience=RetryPolicy(attempts=settings.async_attempts),
        callback_rule=rule,
        callback_s=settings.callback_s,
    )
    calls = TargetCalls(invoke, others)
    return JobWorker(queue, calls, partial(_attempts, functions), worker, log, invoke.tracer)


def _attempts(functions: Functions, function: FunctionId) -> int | None:
    """The attempts in a function's options: the first one and its `retries`; None: the default."""
    deployed = functions.by_id(function)
    if deployed is None or deployed.options.retries is None:
        return None
    return deployed.options.retries + 1


_DAY_S = 24 * 3600.0
# A body in memory can be sent to another instance if the first one breaks off.
_HELD_BYTES = 1 << 20


class TargetCalls:
    """See `FunctionCalls`: calls a job's function.

    `others` call what is no function, by the word before the colon in its name.
    """

    def __init__(self, invoke: Invoke, others: Mapping[str, FunctionCalls]) -> None:
        self._invoke = invoke
        self._others = others

    def call(
        self, call: AsyncCall, body: StoredBody
    ) -> AbstractAsyncContextManager[StreamedResponse]:
        kind, colon, _ = call.function.name.partition(":")
        if not colon:
            return self._call(call, body)
        if kind not in self._others:
            raise Unknown(f"this gateway calls no {kind}")
        return self._others[kind].call(call, body)

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
