"""Posts results to the callback URLs of async calls."""

from collections.abc import Callable
from random import Random

import aiohttp
from aiohttp.resolver import DefaultResolver

from common.http.asgi import Header
from common.telemetry.traces import SpanKind, TraceContext
from gateway_ext.calls.call_headers import asked_wait_s
from gateway_ext.errors import BadRequest
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
_CONNECT_S = 10.0
# A receiver that reads its result more slowly than this is given up.
_SLOWEST_BYTES_S = 128 << 10


class CallbackSender:
    """Posts results; a receiver that fails is tried again, one that refuses is not."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        rule: CallbackRule,
        policy: RetryPolicy,
        answer_s: float,
        now_s: Callable[[], float],
        chance: Random,
        tracer: CallTracer | None = None,
    ) -> None:
        """A receiver has `answer_s` for its answer, beside the time that the body may take."""
        self._answer_s = answer_s
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
        called = self._rule.calls_function(target)
        try:
            # A redirect could lead to a private address, and would turn the POST into a GET.
            async with self._session.post(
                target,
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=self._timeout(body.size_bytes, called=called),
            ) as answer:
                if called:  # a function whose caller leaves before the end is broken off
                    await _read_to_the_end(answer)
                return self._tried(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # aiohttp wraps the resolver's error, which names the refused address.
            return AttemptOutcome(
                0, f"{type(error).__name__}: {error.__cause__ or error}", broken=True
            )

    def _timeout(self, size_bytes: int, *, called: bool) -> aiohttp.ClientTimeout:
        """A function of this gateway has its own time limit, which the gateway keeps."""
        whole_s = self._answer_s + size_bytes / _SLOWEST_BYTES_S
        return aiohttp.ClientTimeout(None if called else whole_s, sock_connect=_CONNECT_S)

    def _tried(self, answer: aiohttp.ClientResponse) -> AttemptOutcome | None:
        if answer.ok and answer.status < 300:  # noqa: PLR2004 - the statuses of success
            return None
        asked_s = asked_wait_s(answer.raw_headers, self._now_s())
        broken = answer.status == _REQUEST_TIMEOUT or answer.status >= _FIRST_OF_SERVER
        why = f"it answered {answer.status}"
        return AttemptOutcome(answer.status, why, broken, retry_after_s=asked_s)


async def _read_to_the_end(answer: aiohttp.ClientResponse) -> None:
    async for _ in answer.content.iter_any():
        pass


def callback_session(rule: CallbackRule) -> aiohttp.ClientSession:
    """The HTTP client for callbacks, which connects to permitted addresses only."""
    resolver = PermittedResolver(DefaultResolver(), rule)
    connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


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
