"""Takes jobs from the queue as places come free, runs them, and sees each one to its ending."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from logging import Logger
from typing import assert_never

from gateway_ext.errors import ClaimLost, GatewayError, QueueFailed
from gateway_ext.jobs.endings import Again, Answered, Dead, Done, Ending
from gateway_ext.jobs.fairness import Limits, choose
from gateway_ext.jobs.model import Job, Kind, Lane
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.retry import BackOff

Handle = Callable[[Job], Awaitable[Ending]]

# How soon the queue itself is asked again where it failed, say because the disk is full.
_QUEUE = BackOff(first_s=0.5, most_s=10.0, jitter=0.0)
# What fails by a fault of ours may fail so each time: it must not be made for ever.
_BUG_S = 30.0
_BUG_ATTEMPTS = 10


class Dispatcher:
    """Runs all jobs of one kind, so many at once and fairly among lanes.

    `now_s` is the time of the day; `lane_of` says which lane a job counts for.
    """

    def __init__(
        self,
        queue: JobQueue,
        kind: Kind,
        limits: Limits,
        handle: Handle,
        lane_of: Callable[[Job], Lane],
        now_s: Callable[[], float],
        log: Logger,
    ) -> None:
        self._queue = queue
        self.kind = kind
        self.endings: Counter[str] = Counter()
        self._limits = limits
        self._handle = handle
        self._lane_of = lane_of
        self._now_s = now_s
        self._log = log
        self._running: Counter[Lane] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        queue.watch(self._changed.set)

    def start(self) -> None:
        """Run jobs until `close`."""
        self._loop = asyncio.create_task(self._dispatch(), name=f"jobs {self.kind.name}")
        self._loop.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Stop; what runs is broken off, and waits in the queue again."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return self._running.total()

    async def _dispatch(self) -> None:
        failures = 0
        while True:
            self._changed.clear()
            try:
                wait_s = await self._round()
                failures = 0
            except QueueFailed as error:
                failures += 1
                wait_s = _QUEUE.wait_s(failures, 1.0)
                self._log.error("jobs wait: %s; next try in %.1f s", error, wait_s)
                await asyncio.sleep(wait_s)
                continue
            await self._wait(wait_s)

    async def _round(self) -> float | None:
        """Start what may be started; the time until something is due, None where nothing is."""
        while True:
            heads = await self._queue.heads(self.kind)
            now_s = self._now_s()
            lanes = choose(heads, self._running, self._limits, now_s)
            jobs = await self._queue.claim(lanes, now_s) if lanes else ()
            for job in jobs:
                self._begin(job)
            if not jobs:
                # What is due but has no place waits for one that runs, not for time.
                return min((h.due_at_s - now_s for h in heads if h.due_at_s > now_s), default=None)

    def _stopped(self, loop: asyncio.Task[None]) -> None:
        """Only `close` may end it; anything else is a bug that must not pass in silence."""
        if not loop.cancelled():
            self._log.critical("jobs are made no more", exc_info=loop.exception())

    async def _wait(self, wait_s: float | None) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return  # something is due

    def _begin(self, job: Job) -> None:
        lane = self._lane_of(job)
        self._running[lane] += 1
        task = asyncio.create_task(self._run(job), name=f"job {job.number}")
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._running[lane] -= 1
            if not self._running[lane]:
                del self._running[lane]
            self._changed.set()
            if not task.cancelled():
                self._say_unended(job, task.exception())

        task.add_done_callback(ended)

    def _say_unended(self, job: Job, error: BaseException | None) -> None:
        """What became of it was not written down: it is claimed until the next start."""
        if error is not None:
            trace = None if isinstance(error, GatewayError) else error
            self._log.error("call %s stays claimed: %r", job.call.id, error, exc_info=trace)

    async def _run(self, job: Job) -> None:
        handling = asyncio.ensure_future(self._handle(job))
        try:
            await asyncio.wait([handling])
        except asyncio.CancelledError:
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)
            await self._queue.again(job.number, self._now_s(), "broken off", counts=False)
            raise
        error = handling.exception()
        if error is None:
            await self._end(job, handling.result())
        else:
            self._log.error("call %s: handling failed", job.call.id, exc_info=error)
            why = f"a fault of the gateway: {error!r}"
            often = job.attempts >= _BUG_ATTEMPTS
            await self._end(job, Dead(why) if often else Again(_BUG_S, why))

    async def _end(self, job: Job, ending: Ending) -> None:
        """Write it down, however long the queue cannot: else nobody has this job any more."""
        try:
            await self._write_down(job, ending)
        finally:
            if isinstance(ending, Answered):
                await ending.body.discard()

    async def _write_down(self, job: Job, ending: Ending) -> None:
        failures = 0
        while True:
            try:
                await self._conclude(job, ending)
            except ClaimLost as error:
                # It was written down before, or another gateway took this one for dead.
                self._log.warning("call %s: %s", job.call.id, error)
                self.endings["lost"] += 1
                return
            except QueueFailed as error:
                failures += 1
                wait_s = _QUEUE.wait_s(failures, 1.0)
                self._log.error("call %s: %s; next try in %.1f s", job.call.id, error, wait_s)
                await asyncio.sleep(wait_s)
            else:
                self.endings[type(ending).__name__.lower()] += 1
                return

    async def _conclude(self, job: Job, ending: Ending) -> None:
        number, now_s = job.number, self._now_s()
        match ending:
            case Done():
                await self._queue.done(number)
            case Again(after_s, why, counts):
                self._log.info("call %s: again in %.1f s: %s", job.call.id, after_s, why)
                await self._queue.again(number, now_s + after_s, why, counts=counts)
            case Answered(result, body, lane):
                await self._queue.answered(number, result, body, lane, now_s)
            case Dead(why, status):
                self._log.warning("call %s to %s is dead: %s", job.call.id, job.call.function, why)
                await self._queue.bury(number, why, now_s, status)
            case _:
                assert_never(ending)
