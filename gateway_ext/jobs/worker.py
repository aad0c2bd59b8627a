"""The async calls of one gateway: its queue, and the calls and callbacks that run within limits."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heapreplace
from logging import Logger
from pathlib import Path
from random import Random
from typing import Self, TypeVar, assert_never

import aiohttp

from common.tasks import BackgroundTasks
from common.telemetry.metrics import BoundedNames, Labels, MetricFamily, gauge
from common.telemetry.stranger_log import StrangerLog
from common.time_limits import time_limit
from gateway_ext import metrics
from gateway_ext.calls.function_table import Functions
from gateway_ext.calls.invoke import PREFIX, Invoke, Streamed, StreamedResponse, close_body
from gateway_ext.errors import ClaimLost, GatewayError, QueueFailed, Unknown
from gateway_ext.jobs.attempts import (
    BackOff,
    CallAnswered,
    JobDead,
    JobDone,
    JobEnding,
    RetryPolicy,
    TryAgain,
)
from gateway_ext.jobs.callbacks import CallbackRule, CallbackSender, callback_session
from gateway_ext.jobs.caller import FunctionCalls, JobCaller
from gateway_ext.jobs.intake import AsyncIntake
from gateway_ext.jobs.queue import JobQueue, QueueLimits, opened
from gateway_ext.jobs.shared import SharedStore
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.values import AsyncCall, Job, JobKind, JobLane, LaneHead, StoredBody, whole
from gateway_ext.model import FunctionId
from gateway_ext.settings import GatewaySettings
from gateway_ext.tracing.tracer import CallTracer

_Value = TypeVar("_Value")
Handle = Callable[[Job], Awaitable[JobEnding]]

# How soon a failed request to the queue is repeated, for example while the disk is full.
_QUEUE_RETRY = BackOff(first_s=0.5, most_s=10.0, jitter=0.0)
# Jobs of a shared queue are due by the wall clock, which may be set: so often it is looked at.
_LOOK_S = 10.0
# A job that meets a defect of the gateway may meet it every time: attempts are bounded.
_DEFECT_ATTEMPTS = 10
# So long a dispatcher that closes waits for its jobs.
_RECORDED_S = 3.0


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """How many jobs run at once, over all lanes and in one lane."""

    overall: int = 64
    per_lane: int = 16

    @property
    def reserve(self) -> int:
        """Places reserved for lanes in which nothing runs."""
        return self.overall // 4


def choose(
    heads: Sequence[LaneHead], running: Mapping[JobLane, int], limits: LaneLimits, now_s: float
) -> list[JobLane]:
    """The lanes to claim jobs from, one entry for each job.

    The next place goes to the lane with the fewest running jobs, among equals to the lane whose
    first job has waited longest. A lane may be named more often than it has jobs.
    """
    free = limits.overall - sum(running.values())
    chosen: list[JobLane] = []
    waiting = [(running.get(h.lane, 0), h.due_at_s, h.lane) for h in heads if h.due_at_s <= now_s]
    heapify(waiting)
    while waiting and free > 0:
        has, due_at_s, lane = waiting[0]
        if has >= limits.per_lane or (has and free <= limits.reserve):
            heappop(waiting)
            continue
        chosen.append(lane)
        free -= 1
        heapreplace(waiting, (has + 1, due_at_s, lane))
    return chosen


@dataclass(eq=False)
class JobDispatcher:
    """Runs the jobs of one kind within limits, fairly among lanes.

    `now_s` is the wall clock; `defect_s` is the wait after an attempt that met a defect of the
    gateway.
    """

    queue: JobQueue
    kind: JobKind
    limits: LaneLimits
    handle: Handle
    now_s: Callable[[], float]
    log: Logger
    defect_s: float = 30.0
    endings: Counter[str] = field(default_factory=Counter, init=False)
    _running: Counter[JobLane] = field(default_factory=Counter, init=False)
    _handling: set[asyncio.Future[JobEnding]] = field(default_factory=set, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._endings_log = StrangerLog(self.log)
        self._loop = BackgroundTasks(self.log, "dispatching jobs")
        self._tasks = BackgroundTasks(self.log, "running jobs")
        self.queue.watch(self._changed.set)

    def start(self) -> None:
        self._loop.start(self._dispatch(), name=f"jobs {self.kind.name}", failed=self._stopped)

    async def close(self) -> None:
        """Stop; running jobs are cancelled and return to the queue.

        Those that have ended get some time to be recorded, or they would be run again.
        """
        await self._loop.close()
        for handling in self._handling:
            handling.cancel()
        await self._tasks.wait(_RECORDED_S)
        await self._tasks.close()

    @property
    def running(self) -> int:
        return self._running.total()

    async def _dispatch(self) -> None:
        while True:
            self._changed.clear()
            await self._wait(await self._persistently("jobs wait", self._round))

    async def _persistently(
        self,
        what: str,
        ask: Callable[[], Awaitable[_Value]],
        final: tuple[type[QueueFailed], ...] = (),
    ) -> _Value:
        """Ask the queue until it does not fail, or with an error that another try cannot mend."""
        failures = 0
        while True:
            try:
                return await ask()
            except final:
                raise
            except QueueFailed as error:
                failures += 1
                wait_s = _QUEUE_RETRY.wait_s(failures, 1.0)
                self.log.error("%s: %s; next try in %.1f s", what, error, wait_s)
                await asyncio.sleep(wait_s)

    async def _round(self) -> float | None:
        """Start every job with a place; the time until the next is due, None where none waits."""
        while True:
            heads = await self.queue.heads(self.kind)
            now_s = self.now_s()
            lanes = choose(heads, self._running, self.limits, now_s)
            jobs = await self.queue.claim(lanes, now_s) if lanes else ()
            for job in jobs:
                self._begin(job)
            if not jobs:
                if lanes:  # another gateway has claimed what was due: others come first now
                    heads = await self.queue.heads(self.kind)
                # A due job without a place waits for a running job to end, not for time.
                return min((h.due_at_s - now_s for h in heads if h.due_at_s > now_s), default=None)

    def _stopped(self, error: BaseException) -> None:
        """Report an end of the loop other than by `close`, which is a defect."""
        self.log.critical("the dispatcher of jobs has stopped", exc_info=error)

    async def _wait(self, wait_s: float | None) -> None:
        try:
            async with time_limit(None if wait_s is None else min(wait_s, _LOOK_S)):
                await self._changed.wait()
        except TimeoutError:
            return  # a job is due, or may be by now

    def _begin(self, job: Job) -> None:
        self._running[job.lane] += 1
        handling = asyncio.ensure_future(self.handle(job))
        self._handling.add(handling)
        handling.add_done_callback(self._handling.discard)
        unrecorded = partial(self._report_unrecorded, job)
        running = self._run(job, handling)
        task = self._tasks.start(running, name=f"job {job.number}", failed=unrecorded)
        task.add_done_callback(lambda _: self._leave(job.lane))

    def _leave(self, lane: JobLane) -> None:
        self._running[lane] -= 1
        if not self._running[lane]:
            del self._running[lane]
        self._changed.set()

    def _report_unrecorded(self, job: Job, error: BaseException) -> None:
        """Log a job whose end could not be recorded: it stays claimed until the next start."""
        trace = None if isinstance(error, GatewayError) else error
        self.log.error("call %s stays claimed: %r", job.call.id, error, exc_info=trace)

    async def _run(self, job: Job, handling: asyncio.Future[JobEnding]) -> None:
        try:
            await asyncio.wait([handling])
        finally:
            handling.cancel()  # where this task was cancelled: else it has ended
        if handling.cancelled():
            await self.queue.reschedule(job.number, self.now_s(), "broken off", counts=False)
            return
        error = handling.exception()
        if error is None:
            await self._end(job, handling.result())
        else:
            self.log.error("call %s: handling failed", job.call.id, exc_info=error)
            why = f"a fault of the gateway: {error!r}"
            last = job.attempts >= _DEFECT_ATTEMPTS
            await self._end(job, JobDead(why) if last else TryAgain(self.defect_s, why))

    async def _end(self, job: Job, ending: JobEnding) -> None:
        """Record the end, for as long as it takes: only this task knows how the job ended."""
        try:
            conclude = partial(self._conclude, job, ending)
            await self._persistently(f"call {job.call.id}", conclude, (ClaimLost,))
        except ClaimLost as error:
            # The end was recorded before, or another gateway considered this one dead.
            self.log.warning("call %s: %s", job.call.id, error)
            self.endings["lost"] += 1
        else:
            self.endings[ending.outcome] += 1
        finally:
            if isinstance(ending, CallAnswered):
                await ending.body.discard()

    async def _conclude(self, job: Job, ending: JobEnding) -> None:
        number, now_s = job.number, self.now_s()
        match ending:
            case JobDone():
                await self.queue.finish(number)
            case TryAgain(after_s, why, counts):
                self._tell(logging.INFO, job, ending, f"again in {after_s:.1f} s: {why}")
                await self.queue.reschedule(number, now_s + after_s, why, counts=counts)
            case CallAnswered(result, body, lane):
                await self.queue.store_result(number, result, body, lane, now_s)
            case JobDead(why, status):
                self._tell(logging.WARNING, job, ending, f"it is dead: {why}")
                await self.queue.bury(number, why, now_s, status)
            case _:
                assert_never(ending)

    def _tell(self, level: int, job: Job, ending: TryAgain | JobDead, text: str) -> None:
        function = job.call.function
        cause = f"{ending.outcome} {function}"
        self._endings_log.log(level, cause, "call %s to %s: %s", job.call.id, function, text)


_PATIENCE = RetryPolicy()


@dataclass(frozen=True, slots=True)
class JobWorkerSettings:
    """Concurrency, the retry policy of both kinds, and where callbacks may go."""

    calls: LaneLimits = LaneLimits()
    callbacks: LaneLimits = LaneLimits(overall=32, per_lane=4)
    patience: RetryPolicy = _PATIENCE
    callback_s: float = 30.0  # that a receiver has for its answer
    callback_rule: CallbackRule = field(default_factory=CallbackRule)
    defect_s: float = 30.0  # the wait after an attempt that met a defect of the gateway
    expire_s: float = 60.0  # between two looks for dead letters that have expired


@dataclass(slots=True, eq=False)
class JobWorker:
    """Runs the jobs of a queue until it is closed; jobs under way then go back to the queue.

    Expired dead letters are removed meanwhile.
    """

    queue: JobQueue
    calls: FunctionCalls
    attempts_of: Callable[[FunctionId], int | None]  # by its options; None for the default
    settings: JobWorkerSettings
    log: Logger
    tracer: CallTracer = field(default_factory=CallTracer)
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _dispatchers: list[JobDispatcher] = field(default_factory=list, init=False)
    _expiring: BackgroundTasks = field(init=False)

    async def __aenter__(self) -> Self:
        settings, chance, rule = self.settings, Random(), self.settings.callback_rule
        now_s = self.queue.now_s
        self._session = callback_session(rule)
        caller = JobCaller(self.calls, self.queue, self._policy_of, chance)
        sender = CallbackSender(
            *(self._session, rule, settings.patience, settings.callback_s, now_s, chance),
            self.tracer,
        )
        for kind, limits, handle in (
            (JobKind.CALL, settings.calls, caller.handle),
            (JobKind.CALLBACK, settings.callbacks, sender.handle),
        ):
            dispatcher = JobDispatcher(
                self.queue, kind, limits, handle, now_s, self.log, settings.defect_s
            )
            self._dispatchers.append(dispatcher)
            dispatcher.start()
        self._expiring = BackgroundTasks(self.log, "removing expired dead letters")
        self._expiring.start(self._expire(), name="dead letters")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._expiring.close()
        await asyncio.gather(*(dispatcher.close() for dispatcher in self._dispatchers))
        if self._session is not None:
            await self._session.close()

    def endings(self) -> Mapping[tuple[JobKind, str], int]:
        return {
            (dispatcher.kind, ending): count
            for dispatcher in self._dispatchers
            for ending, count in dispatcher.endings.items()
        }

    @property
    def running(self) -> int:
        return sum(dispatcher.running for dispatcher in self._dispatchers)

    async def _expire(self) -> None:
        while True:
            try:
                count = await self.queue.expire(self.queue.now_s())
            except QueueFailed as error:
                self.log.warning("expired dead letters are not removed: %s", error)
            else:
                if count:
                    self.log.info("%d expired dead letters were removed", count)
            await asyncio.sleep(self.settings.expire_s)

    def _policy_of(self, function: FunctionId) -> RetryPolicy:
        return self.settings.patience.of(self.attempts_of(function))


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
