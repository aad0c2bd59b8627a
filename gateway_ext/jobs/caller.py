"""Makes the call of a job and decides how the attempt ended."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Protocol

from common.http.asgi import Header
from gateway_ext.calls.invoke import StreamedResponse
from gateway_ext.calls.passed_headers import asked_wait_s
from gateway_ext.error_statuses import status_of
from gateway_ext.errors import (
    BodyLost,
    Busy,
    GatewayError,
    NoGpu,
    QueueFailed,
    Unknown,
    Unreachable,
)
from gateway_ext.jobs.attempts import (
    AttemptOutcome,
    CallAnswered,
    JobDead,
    JobDone,
    JobEnding,
    RetryPolicy,
    TryAgain,
)
from gateway_ext.jobs.body_buffer import BodyBuffer
from gateway_ext.jobs.callbacks import callback_lane
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.values import AsyncCall, CallResult, Job, StoredBody
from gateway_ext.model import FunctionId

_TOO_MANY = 429
_REFUSALS = (Busy, NoGpu)
_TEXT: Sequence[Header] = ((b"content-type", b"text/plain; charset=utf-8"),)


class FunctionCalls(Protocol):
    """Calls functions with leases, limits and waking, as a call from a client has them."""

    def call(
        self, call: AsyncCall, body: StoredBody
    ) -> AbstractAsyncContextManager[StreamedResponse]:
        """The function's answer, while the context lasts; errors are `gateway_ext.errors`.

        Reading the body raises them too, if the function breaks off.
        """


@dataclass(frozen=True, slots=True)
class JobCaller:
    """Calls functions for jobs; `policy_of` gives the retry policy of a function."""

    calls: FunctionCalls
    queue: JobQueue
    policy_of: Callable[[FunctionId], RetryPolicy]
    chance: Random

    async def handle(self, job: Job) -> JobEnding:
        began_s = time.monotonic()
        try:
            return await self._attempt(job, began_s)
        except BodyLost as error:
            return JobDead(str(error))
        except QueueFailed as error:
            return TryAgain(1.0, str(error), counts=False)
        except GatewayError as error:
            return await self._failed(job, _unanswered(error), began_s)

    async def _attempt(self, job: Job, began_s: float) -> JobEnding:
        spool = self.queue.spool()
        try:
            return await self._answered(job, spool, began_s)
        except BaseException:
            await spool.discard()
            raise

    async def _answered(self, job: Job, spool: BodyBuffer, began_s: float) -> JobEnding:
        async with self.calls.call(job.call, job.body) as answer:
            tried = _tried(answer, self.queue.now_s())
            verdict = self._verdict(job, tried)
            if isinstance(verdict, TryAgain):
                return verdict
            unkept = await _read(answer, spool if job.call.callback_url else None)
        if unkept is not None:
            await spool.discard()
            return await self._failed(job, _lost(unkept), began_s)
        failure = verdict.why if verdict else ""
        took_s = time.monotonic() - began_s
        return _ending(job, CallResult(answer.status, answer.headers, took_s, failure), spool)

    async def _failed(self, job: Job, tried: AttemptOutcome, began_s: float) -> JobEnding:
        """There is no answer to send; after the last attempt the error becomes the result."""
        verdict = self._verdict(job, tried)
        if isinstance(verdict, TryAgain):
            return verdict
        failure = verdict.why if verdict else tried.why
        spool = self.queue.spool()
        await spool.write(tried.why.encode())
        took_s = time.monotonic() - began_s
        return _ending(job, CallResult(tried.status, _TEXT, took_s, failure), spool)

    def _verdict(self, job: Job, tried: AttemptOutcome) -> TryAgain | JobDead | None:
        policy = self.policy_of(job.call.function)
        return policy.verdict(tried, job, self.queue.now_s(), self.chance.random())


def _tried(answer: StreamedResponse, now_s: float) -> AttemptOutcome:
    return AttemptOutcome(
        status=answer.status,
        why=f"it answered {answer.status}",
        taken=answer.called or answer.status != _TOO_MANY,
        retry_after_s=asked_wait_s(answer.headers, now_s),
        estimated=answer.refused,
    )


def _unanswered(error: GatewayError) -> AttemptOutcome:
    """An unknown function may become known: providers report theirs after a start."""
    status = status_of(error)
    refused, asked_s = False, 0.0
    if isinstance(error, _REFUSALS):
        refused, asked_s = True, error.retry_after_s or 0.0
    return AttemptOutcome(
        status=status,
        why=str(error),
        broken=isinstance(error, Unreachable | Unknown),
        taken=not (refused and status == _TOO_MANY),
        retry_after_s=asked_s,
        estimated=refused,
    )


async def _read(answer: StreamedResponse, spool: BodyBuffer | None) -> QueueFailed | None:
    """Read an answer that nobody wants, too: a function that breaks off has not answered.

    Returns why the queue's disk did not take it.
    """
    async for chunk in answer.body:
        if spool is None:
            continue
        try:
            await spool.write(chunk)
        except QueueFailed as error:
            return error
    return None


def _lost(error: QueueFailed) -> AttemptOutcome:
    """The function has run, so this was an attempt."""
    return AttemptOutcome(status_of(error), f"its answer is lost: {error}", broken=True)


def _ending(job: Job, result: CallResult, spool: BodyBuffer) -> JobEnding:
    if job.call.callback_url:
        return CallAnswered(result, spool, callback_lane(job.call.callback_url))
    return JobDead(result.failure, result.status) if result.failure else JobDone()
