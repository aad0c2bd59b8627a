"""Makes the call of a job, and says what follows from how it went."""

import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from random import Random

from gateway_ext.asgi import Header
from gateway_ext.errors import (
    BodyLost,
    Busy,
    GatewayError,
    NoGpu,
    QueueFailed,
    Unknown,
    Unreachable,
)
from gateway_ext.jobs.addresses import callback_lane
from gateway_ext.jobs.calls import Answer, Calls
from gateway_ext.jobs.endings import Again, Answered, Dead, Done, Ending
from gateway_ext.jobs.model import Job, Result
from gateway_ext.jobs.queue import JobQueue, Spool
from gateway_ext.jobs.retry import GiveUp, Later, Patience, Tried, Verdict
from gateway_ext.model import FunctionId
from gateway_ext.refusals import status_of

_TOO_MANY = 429
_SECONDS_DIGITS = 9
_TEXT: Sequence[Header] = ((b"content-type", b"text/plain; charset=utf-8"),)


class Caller:
    """Calls functions for jobs; `patience_of` says how often a call of one is tried."""

    def __init__(
        self,
        calls: Calls,
        queue: JobQueue,
        patience_of: Callable[[FunctionId], Patience],
        now_s: Callable[[], float],
        chance: Random,
    ) -> None:
        self._calls = calls
        self._queue = queue
        self._patience_of = patience_of
        self._now_s = now_s
        self._chance = chance

    async def handle(self, job: Job) -> Ending:
        """Make the call once."""
        began_s = time.monotonic()
        spool = self._queue.spool()
        try:
            return await self._attempt(job, spool, began_s)
        except BodyLost as error:
            await spool.discard()
            return Dead(str(error))
        except QueueFailed as error:
            await spool.discard()
            return Again(1.0, str(error), counts=False)
        except GatewayError as error:
            await spool.discard()
            return await self._failed(job, error, began_s)
        except BaseException:
            await spool.discard()
            raise

    async def _attempt(self, job: Job, spool: Spool, began_s: float) -> Ending:
        async with self._calls.call(job.call, job.body) as answer:
            tried = _tried(answer, self._now_s())
            verdict = self._verdict(job, tried)
            if isinstance(verdict, Later):
                return _again(verdict, tried)
            # Read in any case: a function that breaks off in the middle has not answered.
            async for chunk in answer.body:
                if job.call.callback_url:
                    await spool.write(chunk)
        failure = verdict.why if isinstance(verdict, GiveUp) else ""
        took_s = time.monotonic() - began_s
        return _ending(job, Result(answer.status, answer.headers, took_s, failure), spool)

    async def _failed(self, job: Job, error: GatewayError, began_s: float) -> Ending:
        """There is no answer: the error is what the caller is told, once nothing helps."""
        tried = _unanswered(error)
        verdict = self._verdict(job, tried)
        if isinstance(verdict, Later):
            return _again(verdict, tried)
        failure = verdict.why if isinstance(verdict, GiveUp) else str(error)
        spool = self._queue.spool()
        await spool.write(str(error).encode())
        took_s = time.monotonic() - began_s
        return _ending(job, Result(tried.status, _TEXT, took_s, failure), spool)

    def _verdict(self, job: Job, tried: Tried) -> Verdict:
        return self._patience_of(job.call.function).verdict(
            tried,
            attempts=job.attempts,
            deferrals=job.deferrals,
            age_s=self._now_s() - job.call.queued_at_s,
            chance=self._chance.random(),
        )


def asked_wait_s(headers: Sequence[Header], now_s: float) -> float:
    """What a Retry-After asks for, as seconds or as a date; 0 where there is none to be read."""
    text = next((said for name, said in headers if name.lower() == b"retry-after"), b"")
    said = text.decode("latin-1").strip()
    if said.isascii() and said.isdecimal() and len(said) <= _SECONDS_DIGITS:
        return float(said)
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - now_s)
    except (ValueError, OverflowError):  # the latter of a year that no machine can hold
        return 0.0


def _tried(answer: Answer, now_s: float) -> Tried:
    asked_s = asked_wait_s(answer.headers, now_s)
    return Tried(answer.status, f"it answered {answer.status}", retry_after_s=asked_s)


def _unanswered(error: GatewayError) -> Tried:
    """A function that is not known now may be soon: providers tell of theirs after a start."""
    asked_s = (error.retry_after_s or 0.0) if isinstance(error, Busy | NoGpu) else 0.0
    status = status_of(error)
    return Tried(
        status=status,
        why=str(error),
        broken=isinstance(error, Unreachable | Unknown),
        taken=not (isinstance(error, Busy | NoGpu) and status == _TOO_MANY),
        retry_after_s=asked_s,
    )


def _again(later: Later, tried: Tried) -> Again:
    return Again(later.wait_s, tried.why, counts=later.counts)


def _ending(job: Job, result: Result, spool: Spool) -> Ending:
    if job.call.callback_url:
        return Answered(result, spool, callback_lane(job.call.callback_url))
    return Dead(result.failure, result.status) if result.failure else Done()
