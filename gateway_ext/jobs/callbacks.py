"""Sends results to where the caller of an async function wanted them."""

from collections.abc import Callable
from random import Random

import aiohttp
from aiohttp.resolver import DefaultResolver

from gateway_ext.asgi import Header
from gateway_ext.jobs.addresses import PublicResolver
from gateway_ext.jobs.bodies import Body, Held
from gateway_ext.jobs.caller import asked_wait_s
from gateway_ext.jobs.endings import Again, Dead, Done, Ending
from gateway_ext.jobs.model import Call, Job, Result
from gateway_ext.jobs.retry import GiveUp, Later, Patience, Tried
from gateway_ext.tracing.tracer import Tracer, TracerSettings, carrying, said_in
from scheduler.api import SpanKind, TraceContext

_NOT_PASSED_ON = frozenset(
    {
        *("connection", "content-length", "host", "keep-alive", "te", "trailer", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "transfer-encoding", "expect"),
        *("x-call-id", "x-duration-seconds", "x-function-status", "x-function-name"),
        *("traceparent", "tracestate"),
    }
)
_REQUEST_TIMEOUT = 408
_TOO_MANY = 429
_FIRST_OF_SERVER = 500


class Callbacks:
    """Posts results; a receiver that fails is asked again, one that refuses is not."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        patience: Patience,
        now_s: Callable[[], float],
        chance: Random,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or Tracer(TracerSettings())
        self._session = session
        self._patience = patience
        self._now_s = now_s
        self._chance = chance

    async def handle(self, job: Job) -> Ending:
        """Send one result once."""
        assert job.result is not None  # it waits for its callback, so it has one
        tried = await self._post(job.call, job.result, job.body)
        if tried is None:
            failure = job.result.failure
            return Dead(failure, job.result.status) if failure else Done()
        verdict = self._patience.verdict(
            tried,
            attempts=job.attempts,
            deferrals=job.deferrals,
            age_s=self._now_s() - job.call.queued_at_s,
            chance=self._chance.random(),
        )
        if isinstance(verdict, Later):
            return Again(verdict.wait_s, f"callback: {tried.why}", counts=verdict.counts)
        why = verdict.why if isinstance(verdict, GiveUp) else tried.why
        return Dead(f"callback: {why}", tried.status)

    async def _post(self, call: Call, result: Result, body: Body) -> Tried | None:
        """None where it was delivered; its request belongs to the call's trace."""
        name, said = f"callback {call.function}", said_in(call.headers)
        with self._tracer.step(call.id, name, said, SpanKind.CLIENT) as step:
            tried = await self._sent(call, result, body, step.trace)
            step.error = "" if tried is None else tried.why
        return tried

    async def _sent(
        self, call: Call, result: Result, body: Body, trace: TraceContext
    ) -> Tried | None:
        headers = [*_headers(call, result), *map(_shown, carrying((), trace))]
        headers.append(("content-length", str(body.size_bytes)))
        data = body.content if isinstance(body, Held) else body.pieces()
        try:
            # A redirect could lead anywhere, and would turn the POST into a GET.
            async with self._session.post(
                call.callback_url, data=data, headers=headers, allow_redirects=False
            ) as answer:
                if answer.ok and answer.status < 300:  # noqa: PLR2004 - the statuses of success
                    return None
                raw = answer.raw_headers
                asked_s = asked_wait_s(raw, self._now_s())
                broken = answer.status == _REQUEST_TIMEOUT or answer.status >= _FIRST_OF_SERVER
                return Tried(
                    answer.status, f"it answered {answer.status}", broken, retry_after_s=asked_s
                )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # What was wrong with an address is the cause of what aiohttp says of it.
            return Tried(0, f"{type(error).__name__}: {error.__cause__ or error}", broken=True)


def callback_session(*, private: bool, timeout_s: float) -> aiohttp.ClientSession:
    """The client that callbacks go through; `private` says whether to private addresses too."""
    resolver = DefaultResolver()
    connector = aiohttp.TCPConnector(
        resolver=resolver if private else PublicResolver(resolver), use_dns_cache=private
    )
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    jar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)


def _headers(call: Call, result: Result) -> list[tuple[str, str]]:
    """The function's own, and what OpenFaaS says of a result."""
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
