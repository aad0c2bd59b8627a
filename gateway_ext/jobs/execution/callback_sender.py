"""Posts results to the callback URLs of async calls."""

from collections.abc import Callable
from random import Random

import aiohttp
from aiohttp.resolver import DefaultResolver

from common.http.asgi import Header
from common.telemetry.traces import SpanKind, TraceContext
from gateway_ext.errors import BadRequest
from gateway_ext.jobs.execution.job_caller import asked_wait_s
from gateway_ext.jobs.execution.job_endings import JobDead, JobDone, JobEnding, TryAgain
from gateway_ext.jobs.execution.retry_policy import AttemptOutcome, GiveUp, RetryLater, RetryPolicy
from gateway_ext.jobs.intake.callback_addresses import CallbackRule, PermittedResolver
from gateway_ext.jobs.queue.job_bodies import MemoryBody, StoredBody
from gateway_ext.jobs.queue.job_values import AsyncCall, CallResult, Job
from gateway_ext.tracing.call_tracer import CallTracer, TracerSettings, carrying, trace_headers_in

_NOT_PASSED_ON = frozenset(
    {
        *("connection", "content-length", "host", "keep-alive", "te", "trailer", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "transfer-encoding", "expect"),
        *("x-call-id", "x-duration-seconds", "x-function-status", "x-function-name"),
        *("traceparent", "tracestate"),
    }
)
_REQUEST_TIMEOUT = 408
_FIRST_OF_SERVER = 500


class CallbackSender:
    """Posts results; a receiver that fails is tried again, one that refuses is not."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        rule: CallbackRule,
        policy: RetryPolicy,
        now_s: Callable[[], float],
        chance: Random,
        tracer: CallTracer | None = None,
    ) -> None:
        self._tracer = tracer or CallTracer(TracerSettings())
        self._session = session
        self._rule = rule
        self._policy = policy
        self._now_s = now_s
        self._chance = chance

    async def handle(self, job: Job) -> JobEnding:
        """Make one attempt to post a result."""
        assert job.result is not None  # a job that waits for its callback has a result
        tried = await self._post(job.call, job.result, job.body)
        if tried is None:
            failure = job.result.failure
            return JobDead(failure, job.result.status) if failure else JobDone()
        verdict = self._policy.verdict(
            tried,
            attempts=job.attempts,
            deferrals=job.deferrals,
            age_s=self._now_s() - job.call.queued_at_s,
            chance=self._chance.random(),
        )
        if isinstance(verdict, RetryLater):
            return TryAgain(verdict.wait_s, f"callback: {tried.why}", counts=verdict.counts)
        why = verdict.why if isinstance(verdict, GiveUp) else tried.why
        return JobDead(f"callback: {why}", tried.status)

    async def _post(
        self, call: AsyncCall, result: CallResult, body: StoredBody
    ) -> AttemptOutcome | None:
        """None where the result was delivered; the request belongs to the call's trace."""
        name, parent = f"callback {call.function}", trace_headers_in(call.headers)
        with self._tracer.step(call.id, name, parent, SpanKind.CLIENT) as step:
            tried = await self._sent(call, result, body, step.trace)
            step.error = "" if tried is None else tried.why
        return tried

    async def _sent(
        self, call: AsyncCall, result: CallResult, body: StoredBody, trace: TraceContext
    ) -> AttemptOutcome | None:
        headers = [*_headers(call, result), *map(_shown, carrying((), trace))]
        headers.append(("content-length", str(body.size_bytes)))
        data = body.content if isinstance(body, MemoryBody) else body.pieces()
        try:
            # The call may have been stored under another rule, or by another gateway.
            target = self._rule.target(call.callback_url)
        except BadRequest as error:
            return AttemptOutcome(0, str(error), broken=False)
        try:
            # A redirect could lead to a private address, and would turn the POST into a GET.
            async with self._session.post(
                target, data=data, headers=headers, allow_redirects=False
            ) as answer:
                if answer.ok and answer.status < 300:  # noqa: PLR2004 - the statuses of success
                    return None
                raw = answer.raw_headers
                asked_s = asked_wait_s(raw, self._now_s())
                broken = answer.status == _REQUEST_TIMEOUT or answer.status >= _FIRST_OF_SERVER
                return AttemptOutcome(
                    answer.status, f"it answered {answer.status}", broken, retry_after_s=asked_s
                )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # aiohttp wraps the resolver's error, which names the refused address.
            return AttemptOutcome(
                0, f"{type(error).__name__}: {error.__cause__ or error}", broken=True
            )


def callback_session(rule: CallbackRule, timeout_s: float) -> aiohttp.ClientSession:
    """The HTTP client for callbacks, which connects to permitted addresses only."""
    resolver = PermittedResolver(DefaultResolver(), rule)
    connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    jar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)


def _headers(call: AsyncCall, result: CallResult) -> list[tuple[str, str]]:
    """The function's headers, and those that OpenFaaS adds to a result."""
    own = [shown for shown in map(_shown, result.headers) if shown[0] not in _NOT_PASSED_ON]
    return [
        *own,
        ("x-call-id", call.id),
        ("x-duration-seconds", f"{result.duration_s:f}"),
        ("x-function-status", str(result.status)),
        ("x-function-name", str(call.function)),
    ]


def _shown(header: Header) -> tuple[str, str]:
    return header[0].decode("latin-1").lower(), header[1].decode("latin-1")
