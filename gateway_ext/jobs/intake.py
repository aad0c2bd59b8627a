"""Takes calls of async functions in: 202 once a job is kept, and not before."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol
from uuid import uuid4

from gateway_ext.asgi import Header, Message, Receive, Scope, Send, answer, say
from gateway_ext.errors import (
    BadRequest,
    CallerGone,
    GatewayError,
    TooLarge,
    TooSlow,
    Unknown,
    WrongMethod,
)
from gateway_ext.jobs.addresses import checked_url
from gateway_ext.jobs.model import Call
from gateway_ext.jobs.queue import JobQueue, Spool
from gateway_ext.model import FunctionId
from gateway_ext.refusals import headers_of, status_of
from gateway_ext.tracing.tracer import Tracer, TracerSettings, carrying, said_in
from scheduler.api import SpanKind

PREFIX = b"/async-function/"

_CALL_ID_BYTES = 256
_PAUSE_S = 30.0
_DROPPED = frozenset(
    {
        *(b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"trailer"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"upgrade"),
        *(b"transfer-encoding", b"x-call-id", b"x-forwarded-for", b"x-forwarded-host"),
    }
)
_GPU = b"x-gpu-"


class Known(Protocol):
    """A function that is deployed."""

    @property
    def id(self) -> FunctionId:
        """Its name."""
        ...


class _Headers(NamedTuple):
    """What is kept of a request's headers, and what some of them say."""

    kept: Sequence[Header]
    call_id: str
    callback_url: str


class Intake:
    """The ASGI application of /async-function/; `by_path` is that of the table of functions."""

    def __init__(
        self,
        by_path: Callable[[bytes], Known | None],
        queue: JobQueue,
        *,
        max_body_bytes: int,
        callback_private: bool,
        body_s: float = 300.0,
        tracer: Tracer | None = None,
    ) -> None:
        """A body must come within `body_s`, and no pause in it be longer than half a minute."""
        self._tracer = tracer or Tracer(TracerSettings())
        self._by_path = by_path
        self._queue = queue
        self._max_body_bytes = max_body_bytes
        self._callback_private = callback_private
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            call_id = await self._take(scope, receive)
        except CallerGone:
            return
        except GatewayError as error:
            await say(send, status_of(error), str(error), headers_of(error))
        else:
            await answer(send, 202, headers=((b"x-call-id", call_id.encode("latin-1")),))

    async def _take(self, scope: Scope, receive: Receive) -> str:
        call = self._call(scope)
        name, said = f"queue {call.function}", said_in(call.headers)
        with self._tracer.step(call.id, name, said, SpanKind.PRODUCER) as step:
            traced = replace(call, headers=carrying(call.headers, step.trace))
            await self._keep(traced, _length_bytes(scope), receive)
        return call.id

    async def _keep(self, call: Call, length_bytes: int, receive: Receive) -> None:
        head_bytes = call.head_bytes
        body = self._queue.spool()
        try:
            # Bodies on their way take their place already, or many at once would fill the disk.
            with self._queue.tally.room(call.function, head_bytes + length_bytes) as room:
                await self._read_in_time(
                    receive, body, lambda size_bytes: room.hold(head_bytes + size_bytes)
                )
            # The queue makes room itself, and nothing runs in between.
            # False: the same call is kept already, and that is as good.
            await self._queue.put(call, body)
        finally:
            await body.discard()

    def _call(self, scope: Scope) -> Call:
        if scope["method"] != "POST":
            raise WrongMethod(scope["method"])
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        name, slash, rest = raw.removeprefix(PREFIX).partition(b"/")
        if not name:
            raise BadRequest("the function's name is missing")
        function = self._by_path(name)
        if function is None:
            raise Unknown(f"function {name.decode('latin-1')} is not deployed")
        headers = self._headers(scope)
        if _length_bytes(scope) > self._max_body_bytes:
            raise TooLarge(self._max_body_bytes)
        return Call(
            id=headers.call_id or str(uuid4()),
            function=function.id,
            method="POST",
            path=slash + rest or b"/",
            query=scope["query_string"],
            headers=headers.kept,
            queued_at_s=time.time(),
            callback_url=headers.callback_url,
        )

    def _headers(self, scope: Scope) -> _Headers:
        said: dict[bytes, bytes] = dict(scope["headers"])
        kept = [
            header
            for header in scope["headers"]
            if header[0] not in _DROPPED and not header[0].startswith(_GPU)
        ]
        url = said.get(b"x-callback-url", b"").decode("latin-1")
        return _Headers(
            kept=[*kept, *_forwarded(scope, said)],
            call_id=said.get(b"x-call-id", b"")[:_CALL_ID_BYTES].decode("latin-1"),
            callback_url=checked_url(url, private=self._callback_private) if url else "",
        )

    async def _read_in_time(
        self, receive: Receive, body: Spool, hold: Callable[[int], None]
    ) -> None:
        try:
            async with asyncio.timeout(self._body_s):
                await self._read(receive, body, hold)
        except TimeoutError as error:
            raise TooSlow(self._body_s) from error

    async def _read(self, receive: Receive, body: Spool, hold: Callable[[int], None]) -> None:
        size_bytes = 0
        more = True
        while more:
            message = await self._next(receive)
            if message["type"] == "http.disconnect":
                raise CallerGone
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            size_bytes += len(chunk)
            if size_bytes > self._max_body_bytes:
                raise TooLarge(self._max_body_bytes)
            hold(size_bytes)
            if chunk:
                await body.write(chunk)

    async def _next(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(_PAUSE_S):
                return await receive()
        except TimeoutError as error:
            raise TooSlow(_PAUSE_S) from error


def _length_bytes(scope: Scope) -> int:
    """How large the body is to be; 0 where the caller does not say."""
    said = dict(scope["headers"]).get(b"content-length", b"")
    return int(said) if said.isdigit() else 0


def _forwarded(scope: Scope, said: dict[bytes, bytes]) -> list[Header]:
    """Who asked, as it is known now: the call itself is made by the gateway."""
    through = [said[b"x-forwarded-for"]] if b"x-forwarded-for" in said else []
    client = scope.get("client")
    hops = [*through, client[0].encode()] if client and client[0] else through
    host = said.get(b"x-forwarded-host") or said.get(b"host")
    found = [(b"x-forwarded-for", b", ".join(hops))] if hops else []
    return [*found, (b"x-forwarded-host", host)] if host else found
