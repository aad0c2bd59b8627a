"""Accepts async calls: the answer is 202 once the job is stored, not before."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from uuid import uuid4

from common.http.asgi import (
    Header,
    Message,
    Receive,
    Scope,
    Send,
    announced_bytes,
    send_response,
    send_text,
)
from common.telemetry.traces import SpanKind
from common.time_limits import time_limit
from gateway_ext.calls.passed_headers import DATA, call_id_in
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import (
    BadRequest,
    CallerGone,
    GatewayError,
    TooLarge,
    TooSlow,
    Unknown,
    WrongMethod,
)
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.values import AsyncCall
from gateway_ext.model import FunctionId
from gateway_ext.tracing.tracer import CallTracer, carrying, trace_headers_in

_DROPPED = frozenset(
    {
        *(b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"trailer"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"upgrade"),
        *(b"transfer-encoding", b"x-call-id", b"x-forwarded-for", b"x-forwarded-host"),
    }
)
_GPU = b"x-gpu-"
# In this time a body must arrive, without a pause longer than the other one.
_BODY_S, _PAUSE_S = 300.0, 30.0


@dataclass(frozen=True, slots=True)
class AsyncIntake:
    """The ASGI application of /async-function/, or /async-workflow/, where a path behind the name
    reaches no stage; `by_path` finds what stands in jobs for the one of a path.
    """

    by_path: Callable[[bytes], FunctionId | None]
    queue: JobQueue
    _: KW_ONLY
    max_body_bytes: int
    callback_rule: CallbackRule
    what: str = "function"
    # Whether an Authorization header has our credentials, which are not stored.
    is_ours: Callable[[bytes], bool] = lambda _: False
    tracer: CallTracer = field(default_factory=CallTracer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named: list[Header] = []
        try:
            call = self._call(scope)
            # With an error, too: a client that sends the call again under its id has it made once.
            named.append((b"x-call-id", call.id.encode("latin-1")))
            await self._take(call, scope, receive)
        except CallerGone:
            return
        except GatewayError as error:
            await send_text(send, status_of(error), str(error), [*headers_of(error), *named])
        else:
            await send_response(send, 202, headers=named)

    async def _take(self, call: AsyncCall, scope: Scope, receive: Receive) -> None:
        name, parent = f"queue {call.function}", trace_headers_in(call.headers)
        with self.tracer.step(call.id, name, parent, SpanKind.PRODUCER) as step:
            traced = replace(call, headers=carrying(call.headers, step.trace))
            await self._keep(traced, announced_bytes(scope), receive)

    async def _keep(self, call: AsyncCall, length_bytes: int, receive: Receive) -> None:
        head_bytes = call.head_bytes
        body = self.queue.spool()
        try:
            # Arriving bodies reserve space, or many at once would fill the disk.
            with self.queue.tally.reserve(call.function, head_bytes + length_bytes) as grow_to:

                async def take(piece: bytes) -> None:
                    grow_to(head_bytes + body.size_bytes + len(piece))
                    await body.write(piece)

                await read_body(receive, take, self.max_body_bytes, _BODY_S)
            # The queue reserves the space itself, and nothing else runs in between.
            # False means that the same call is stored already, which answers the client as well.
            await self.queue.put(call, body)
        finally:
            await body.discard()

    def _call(self, scope: Scope) -> AsyncCall:
        if scope["method"] != "POST":
            raise WrongMethod(scope["method"])
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        name, slash, rest = raw.removeprefix(b"/async-%b/" % self.what.encode()).partition(b"/")
        if not name:
            raise BadRequest("the path names nothing to call")
        function = self.by_path(name)
        if function is None:
            raise Unknown(f"{self.what} {name.decode('latin-1')} is not deployed")
        values: dict[bytes, bytes] = dict(scope["headers"])
        url = values.get(b"x-callback-url", b"").decode("latin-1")
        if url:
            self.callback_rule.target(url)
        if announced_bytes(scope) > self.max_body_bytes:
            raise TooLarge(self.max_body_bytes)
        return AsyncCall(
            id=call_id_in(values.get(b"x-call-id", b"")).decode("latin-1") or str(uuid4()),
            function=function,
            method="POST",
            path=slash + rest or b"/",
            query=scope["query_string"],
            headers=[*self._kept(scope["headers"]), *_forwarded(scope, values)],
            queued_at_s=self.queue.now_s(),
            callback_url=url,
        )

    def _kept(self, headers: Sequence[Header]) -> list[Header]:
        return [
            header
            for header in headers
            if header[0] not in _DROPPED and (header[0] == DATA or not header[0].startswith(_GPU))
            if header[0] != b"authorization" or not self.is_ours(header[1])
        ]


def _forwarded(scope: Scope, values: dict[bytes, bytes]) -> list[Header]:
    """The forwarding headers of the request, as the gateway makes the call itself later."""
    through = [values[b"x-forwarded-for"]] if b"x-forwarded-for" in values else []
    client = scope.get("client")
    hops = [*through, client[0].encode()] if client and client[0] else through
    host = values.get(b"x-forwarded-host") or values.get(b"host")
    forwarded = [(b"x-forwarded-for", b", ".join(hops))] if hops else []
    return [*forwarded, (b"x-forwarded-host", host)] if host else forwarded


async def read_body(
    receive: Receive, take: Callable[[bytes], Awaitable[None]], most_bytes: int, within_s: float
) -> None:
    """Give `take` each piece as it arrives; TooLarge, TooSlow, or CallerGone."""
    size_bytes = 0
    more = True
    try:
        async with time_limit(within_s):
            while more:
                message = await _next(receive)
                if message["type"] == "http.disconnect":
                    raise CallerGone
                piece: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                size_bytes += len(piece)
                if size_bytes > most_bytes:
                    raise TooLarge(most_bytes)
                if piece:
                    await take(piece)
    except TimeoutError as error:
        raise TooSlow(within_s) from error


async def _next(receive: Receive) -> Message:
    try:
        async with time_limit(_PAUSE_S):
            return await receive()
    except TimeoutError as error:
        raise TooSlow(_PAUSE_S) from error
