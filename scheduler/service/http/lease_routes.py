"""The routes that every caller takes, as plain ASGI: leases, and the presence of their holders."""

from asyncio import CancelledError, Task, current_task, get_running_loop, wait
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from pydantic_core import to_json

from common.http import asgi
from common.http.asgi import Receive, Scope, Send, until_disconnected
from common.telemetry.traces import TRACEPARENT, TRACESTATE, TraceContext, trace_of
from common.telemetry.work_context import ABOUT, Work
from scheduler.api import Placement
from scheduler.model.errors import (
    BodyTooLarge,
    CallerNotAllowed,
    MalformedRequest,
    NotLeading,
    RequestWithdrawn,
    SchedulerError,
)
from scheduler.model.values import Request, RequestId
from scheduler.service import error_table
from scheduler.service.callers.caller_leases import CallerLeases
from scheduler.service.http import request_bodies
from scheduler.service.http.access import ApiAccess
from scheduler.service.leadership.term import Office
from scheduler.service.metrics.counters import SchedulerCounters
from scheduler.service.views.wait_progress import WaitProgress

MOST_BODY_BYTES = 1 << 20
_JSON = (b"content-type", b"application/json")
_LINES = (b"content-type", b"application/jsonl")
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()
_EMPTY = {"type": "http.response.body"}
_CALLER = b"x-gpufaas-caller"
# A caller knows by these that the leader lives.
_BEAT_S = 1.0
_BEAT = {"type": "http.response.body", "body": b"\n", "more_body": True}


class Leading(Protocol):
    """The part of the service that these routes use."""

    def office(self) -> Office:
        """The leader's core, driver and history; NotLeading if this scheduler does not lead."""
        ...

    def signed(self, placement: Placement, request: Request) -> tuple[int, tuple[str, ...], str]:
        """What an answer has beside the placement: term, addresses and a signed token."""
        ...


class HotPath:
    """Serves the routes of `routes` and no other."""

    def __init__(
        self,
        leading: Leading,
        access: ApiAccess,
        meters: SchedulerCounters,
        callers: CallerLeases,
    ) -> None:
        self._leading = leading
        self._access = access
        self._meters = meters
        self._callers = callers
        self.routes: Mapping[str, Callable[[Scope, Receive, Send], Awaitable[int]]] = {
            "/acquire": self._acquire,
            "/wanted": self._wanted,
            "/release": self._release,
            "/cancel": self._cancel,
            "/presence": self._presence,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request to one of the routes; only POST is accepted."""
        path = scope["path"]
        try:
            if self._access.role(header_of(scope, b"authorization")) is None:
                raise unknown_caller()
            if scope["method"] != "POST":
                raise MalformedRequest(f"{path} takes POST only")
            status = await self.routes[path](scope, receive, send)
        except SchedulerError as error:
            status = await send_error(send, error)
        self._meters.answered[path, status] += 1

    async def _acquire(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._leading.office()
        body = await _body(scope, receive)
        request = request_bodies.acquire(body, office.clock.now_s())
        ABOUT.set(Work(_trace(scope), function=request.function, request=request.id))
        if b"progress=1" in scope["query_string"]:
            return await self._stream_progress(office, request, scope, receive, send)
        presence = CallerPresence(receive)
        try:
            if not office.has_gpus:
                await office.some_gpu()
            placement = await office.driver.acquire(request)
        except CancelledError:
            return presence.lost()
        except RequestWithdrawn as error:
            raise self._ended(office, error) from error
        finally:
            presence.end()
        self._callers.granted(office, _caller(scope), placement.lease, request.id)
        return await self._placed(send, placement, request)

    async def _wanted(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._leading.office()
        request_id = request_bodies.request(await _body(scope, receive))
        ABOUT.set(Work(_trace(scope), request=request_id))
        presence = CallerPresence(receive)
        try:
            placement = await office.driver.wanted(request_id)
        except CancelledError:
            return presence.lost()
        except RequestWithdrawn as error:
            raise self._ended(office, error) from error
        finally:
            presence.end()
        self._callers.granted(office, _caller(scope), placement.lease, request_id)
        return await self._placed(send, placement, _request(office, request_id))

    async def _release(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._leading.office()
        released = request_bodies.release(await _body(scope, receive))
        office.driver.report(released)
        self._callers.released(released.lease, released.request)
        return await _nothing(send)

    async def _cancel(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._leading.office()
        office.driver.cancel(request_bodies.request(await _body(scope, receive)))
        return await _nothing(send)

    async def _presence(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer with an empty line a second, for as long as the caller and this leader are there.

        The leases that the caller acquired end soon after the connection does.
        """
        office = self._leading.office()
        caller, leases = request_bodies.presence(await _body(scope, receive))
        await send({"type": "http.response.start", "status": 200, "headers": [_LINES]})
        with self._callers.present(office, caller, leases):
            gone = get_running_loop().create_task(until_disconnected(receive))
            try:
                while not gone.done() and not office.closed:
                    await send(_BEAT)
                    await wait({gone}, timeout=_BEAT_S)
            finally:
                gone.cancel()
        if not gone.done():
            await send(_EMPTY)
        return 200

    async def _stream_progress(
        self, office: Office, request: Request, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Stream lines of progress; the last one is the placement or the error."""
        presence = CallerPresence(receive)

        async def line(fields: Mapping[str, Any]) -> None:
            part = _json(fields) + b"\n"
            await send({"type": "http.response.body", "body": part, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": [_LINES]})
        try:
            async with WaitProgress(office, request.id, line):
                if not office.has_gpus:
                    await office.some_gpu()
                placement = await office.driver.acquire(request)
            self._callers.granted(office, _caller(scope), placement.lease, request.id)
            await line({"state": "placed"} | self._answer(placement, request))
        except CancelledError:
            return presence.lost()
        except SchedulerError as error:
            ended = self._ended(office, error) if isinstance(error, RequestWithdrawn) else error
            status = {"status": error_table.failure(ended).status}
            await line({"state": "ended"} | status | error_table.body(ended))
        finally:
            presence.end()
        await send(_EMPTY)
        return 200

    async def _placed(self, send: Send, placement: Placement, request: Request) -> int:
        return await _answer(send, 200, self._answer(placement, request))

    def _answer(self, placement: Placement, request: Request) -> dict[str, Any]:
        estimate = placement.estimate
        term, addresses, token = self._leading.signed(placement, request)
        return {
            "request": request.id,
            "lease": placement.lease,
            "gpu": placement.gpu,
            "node": placement.node,
            "slot": placement.slot,
            "models": placement.models,
            "hit": placement.hit,
            "estimate": {"load_s": estimate.load_s, "run_s": estimate.run_s},
            "term": term,
            "addresses": addresses,
            "token": token,
        }

    def _ended(self, office: Office, error: RequestWithdrawn) -> SchedulerError:
        """A request that ended with its leader's term must be sent again to the next leader."""
        if not office.closed:
            return error
        try:
            self._leading.office()
        except NotLeading as moved:
            return moved
        return NotLeading(None)


def unknown_caller() -> CallerNotAllowed:
    """The error for a request without a credential of ours."""
    return CallerNotAllowed(
        "no valid credentials in the Authorization header: Bearer and what `gpufaas token` prints",
        known=False,
    )


def header_of(scope: Scope, name: bytes) -> bytes:
    """The first header of this name (lower case), or nothing."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


async def send_error(send: Send, error: SchedulerError) -> int:
    """Answer an error as the table of errors has it; returns the status."""
    status = error_table.failure(error).status
    return await _answer(send, status, error_table.body(error), error_table.headers(error))


class CallerPresence:
    """Cancels the current task once its caller has disconnected, if the task waits at all.

    Watching begins at the next step of the event loop: a request that is answered at once costs
    nothing.
    """

    def __init__(self, receive: Receive) -> None:
        task = current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._receive = receive
        self._gone = False
        self._watch: Task[None] | None = None
        self._begin = get_running_loop().call_soon(self._start)

    def end(self) -> None:
        """Stop watching."""
        self._begin.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # a cancelled task refers to all that it worked with

    def lost(self) -> int:
        """The status to count for a caller that has gone; re-raises any other cancellation."""
        if not self._gone:
            raise CancelledError
        self._task.uncancel()
        return 499

    def _start(self) -> None:
        self._watch = get_running_loop().create_task(self._until_gone())

    async def _until_gone(self) -> None:
        await until_disconnected(self._receive)
        self._gone = True
        self._task.cancel()


def _caller(scope: Scope) -> str:
    return header_of(scope, _CALLER).decode("latin-1")


def _request(office: Office, request_id: RequestId) -> Request:
    pending = office.core.requests.get(request_id)
    if pending is None:  # the request ended while its answer was being made
        raise RequestWithdrawn(request_id, "it has ended")
    return pending.request


def _trace(scope: Scope) -> TraceContext | None:
    parent = header_of(scope, _TRACEPARENT)
    if not parent:
        return None
    state = header_of(scope, _TRACESTATE)
    return trace_of(parent.decode("latin-1"), state.decode("latin-1"))


async def _body(scope: Scope, receive: Receive) -> bytes:
    try:
        return await asgi.read_body(scope, receive, MOST_BODY_BYTES)
    except asgi.BodyOverBound as error:
        raise BodyTooLarge(str(error)) from error


def _json(fields: Mapping[str, Any]) -> bytes:
    return to_json(fields, inf_nan_mode="constants")


async def _answer(
    send: Send, status: int, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> int:
    body = _json(fields)
    shown = [_JSON, (b"content-length", b"%d" % len(body))]
    shown += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": body})
    return status


async def _nothing(send: Send) -> int:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send(_EMPTY)
    return 204
