"""The routes that every caller takes, as plain ASGI: leases, and the presence of their holders."""

from asyncio import CancelledError, Queue, current_task, get_running_loop, wait
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from pydantic_core import to_json

from cache_manager.model.ids import ModelId, NodeId
from common.http import asgi
from common.http.asgi import Receive, Scope, Send, header_in, until_disconnected
from common.telemetry.traces import TRACEPARENT, TRACESTATE, TraceContext, trace_of
from common.telemetry.work_context import ABOUT, Work
from common.time_limits import time_limit
from scheduler.api import Placement
from scheduler.cluster.request_queue import Standing
from scheduler.model.actions import EnqueueLocally
from scheduler.model.errors import (
    BodyTooLarge,
    CallerNotAllowed,
    MalformedRequest,
    NotLeading,
    RequestWithdrawn,
    SchedulerError,
)
from scheduler.model.events import LeaseReleased
from scheduler.model.values import LeaseId, Request, RequestId
from scheduler.service import error_table
from scheduler.service.history.history import Decided
from scheduler.service.leadership.term import Office
from scheduler.service.request_bounds import MOST_S, MOST_WHOLE, check_name, check_request
from scheduler.service.scheduler_service import SchedulerService
from scheduler.wire.caller_stream import MOST_LEASES
from scheduler.wire.request_times import absolute

MOST_BODY_BYTES = 1 << 20
_JSON = (b"content-type", b"application/json")
_LINES = (b"content-type", b"application/jsonl")
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()
_EMPTY = {"type": "http.response.body"}
_CALLER = b"x-gpufaas-caller"
_UNKNOWN, _MISSING = "Object contains unknown field `", "Object missing required field `"
Seconds = Annotated[float, Meta(ge=0.0, le=MOST_S)]
_Body = TypeVar("_Body", bound=Struct)
# The status to count for a caller that has gone.
_GONE = 499
# A caller knows by these that the leader lives.
_BEAT_S = 1.0
_BEAT = {"type": "http.response.body", "body": b"\n", "more_body": True}


class HotPath:
    """Serves the routes of `routes` and no other."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
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
            if self._service.access.role(header_in(scope, b"authorization")) is None:
                raise unknown_caller()
            if scope["method"] != "POST":
                raise MalformedRequest(f"{path} takes POST only")
            status = await self.routes[path](scope, receive, send)
        except SchedulerError as error:
            status = await send_error(send, error)
        self._service.meters.answered[path, status] += 1

    async def _acquire(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._service.office()
        body = await _body(scope, receive)
        request = acquire(body, office.clock.now_s())
        ABOUT.set(Work(_trace(scope), function=request.function, request=request.id))
        if b"progress=1" in scope["query_string"]:
            return await self._stream_progress(office, request, scope, send)
        placement = await self._placement(office, scope, office.acquire(request))
        if placement is None:
            return _GONE
        return await _answer(send, 200, self._granted(scope, placement, request))

    async def _wanted(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._service.office()
        request_id = request(await _body(scope, receive))
        ABOUT.set(Work(_trace(scope), request=request_id))
        placement = await self._placement(office, scope, office.driver.wanted(request_id))
        if placement is None:
            return _GONE
        granted = self._granted(scope, placement, office.request(request_id))
        return await _answer(send, 200, granted)

    async def _placement(
        self, office: Office, scope: Scope, asking: Awaitable[Placement]
    ) -> Placement | None:
        """Wait for the lease; None if the caller goes away meanwhile."""
        task, watch = current_task(), asgi.watch_in(scope)
        assert task is not None, "only a task can be cancelled"
        assert watch is not None, "our server has one for each request"
        watch.start(task.cancel)
        try:
            return await asking
        except CancelledError:
            if watch.has_left and not task.uncancel():
                return None
            raise
        except RequestWithdrawn as error:
            if office.closed:  # it must be sent again to the next leader
                raise NotLeading(self._service.elsewhere()) from error
            raise
        finally:
            watch.stop()

    async def _release(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._service.office()
        released = release(await _body(scope, receive))
        office.driver.report(released)
        self._service.leases.released(released.lease, released.request)
        return await _nothing(send)

    async def _cancel(self, scope: Scope, receive: Receive, send: Send) -> int:
        office = self._service.office()
        office.driver.cancel(request(await _body(scope, receive)))
        return await _nothing(send)

    async def _presence(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer with an empty line a second, for as long as the caller and this leader are there.

        The leases that the caller acquired end soon after the connection does.
        """
        office = self._service.office()
        caller, leases = presence(await _body(scope, receive))
        await send({"type": "http.response.start", "status": 200, "headers": [_LINES]})
        with self._service.leases.present(office, caller):
            for lease in leases:
                self._service.leases.granted(office, caller, lease)
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
        self, office: Office, request: Request, scope: Scope, send: Send
    ) -> int:
        """Stream lines of progress; the last one is the placement or the error."""

        async def line(fields: Mapping[str, Any]) -> None:
            part = _json(fields) + b"\n"
            await send({"type": "http.response.body", "body": part, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": [_LINES]})
        try:
            async with _progress(office, request.id, line):
                placement = await self._placement(office, scope, office.acquire(request))
            if placement is None:
                return _GONE
            await line({"state": "placed"} | self._granted(scope, placement, request))
        except SchedulerError as error:
            status = {"status": error_table.failure(error).status}
            await line({"state": "ended"} | status | error_table.body(error))
        await send(_EMPTY)
        return 200

    def _granted(self, scope: Scope, placement: Placement, request: Request) -> dict[str, Any]:
        """The answer to the caller, which has this lease from now on."""
        caller = header_in(scope, _CALLER).decode("latin-1")
        granted = self._service.grant(caller, placement, request)
        return {
            "request": request.id,
            "lease": placement.lease,
            "gpu": placement.gpu,
            "node": placement.node,
            "slot": placement.slot,
            "models": placement.models,
            "hit": placement.hit,
            "estimate": placement.estimate._asdict(),
            "term": granted.term,
            "addresses": granted.addresses,
            "token": granted.token,
        }


def unknown_caller() -> CallerNotAllowed:
    return CallerNotAllowed(
        "no valid credentials in the Authorization header: Bearer and what `gpufaas token` prints",
        known=False,
    )


async def send_error(send: Send, error: SchedulerError) -> int:
    """Answer an error as the table of errors has it; returns the status."""
    status = error_table.failure(error).status
    return await _answer(send, status, error_table.body(error), error_table.headers(error))


def _trace(scope: Scope) -> TraceContext | None:
    parent, state = header_in(scope, _TRACEPARENT), header_in(scope, _TRACESTATE)
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
    shown = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await asgi.send_response(send, status, _json(fields), (_JSON, *shown))
    return status


async def _nothing(send: Send) -> int:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send(_EMPTY)
    return 204


class AcquireBody(Struct, forbid_unknown_fields=True):
    """A request for a lease; its times are relative to now."""

    request: str
    function: str
    models: list[str]
    batch: int = 1
    deadline_in_s: Seconds | None = None
    waited_s: Seconds | None = None
    priority: int = 0
    application: str | None = None
    stage: str | None = None
    slo_s: Seconds | None = None
    near: str | None = None
    registered_only: bool = False
    max_wait_s: Seconds | None = None
    exit_rule: str | None = None


class RequestBody(Struct, forbid_unknown_fields=True):
    """The request that asks for another lease, or is cancelled."""

    request: str


class ReleaseBody(Struct, forbid_unknown_fields=True):
    """A lease that is given back, of several requests by the named one."""

    lease: Annotated[int, Meta(ge=1, le=MOST_WHOLE)]
    may_return: bool = False
    request: str | None = None


class PresenceBody(Struct, forbid_unknown_fields=True):
    """The name under which a caller acquires leases, and the leases that it holds already."""

    caller: str
    leases: Annotated[list[int], Meta(max_length=MOST_LEASES)] = []


def acquire(body: bytes, now_s: float) -> Request:
    """The request; its body's times are relative, its own times are the scheduler's."""
    fields = _read(body, AcquireBody)
    asked = Request(
        id=RequestId(fields.request),
        function=fields.function,
        models=tuple(map(ModelId, fields.models)),
        batch=fields.batch,
        deadline_s=fields.deadline_in_s,
        priority=fields.priority,
        arrived_s=-(fields.waited_s or 0.0),
        application=fields.application or "",
        stage=fields.stage or "",
        slo_s=fields.slo_s,
        near=NodeId(fields.near) if fields.near else None,
        registered_only=fields.registered_only,
        max_wait_s=fields.max_wait_s,
        exit_rule=fields.exit_rule or None,
    )
    return absolute(check_request(asked), now_s)


def request(body: bytes) -> RequestId:
    return RequestId(check_name("request", _read(body, RequestBody).request))


def release(body: bytes) -> LeaseReleased:
    fields = _read(body, ReleaseBody)
    named = RequestId(check_name("request", fields.request)) if fields.request else None
    return LeaseReleased(LeaseId(fields.lease), fields.may_return, named)


def presence(body: bytes) -> tuple[str, tuple[LeaseId, ...]]:
    """The name under which a caller acquires leases, and the leases that it holds already."""
    fields = _read(body, PresenceBody)
    return check_name("caller", fields.caller), tuple(map(LeaseId, fields.leases))


def _read(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise MalformedRequest(_explained(str(error), kind.__struct_fields__)) from error
    except ValueError as error:
        raise MalformedRequest(f"no JSON: {error}") from error


def _explained(problem: str, known: Iterable[str]) -> str:
    """What msgspec says of a body, the field first."""
    what, _, field = problem.partition(" - at `$.")
    if field:
        return f"{field.rstrip('`')}: {what}"
    if what.startswith(_UNKNOWN):
        return f"unknown: {what[len(_UNKNOWN) : -1]}; known: {', '.join(sorted(known))}"
    if what.startswith(_MISSING):
        return f"{what[len(_MISSING) : -1]}: missing"
    return "a JSON object is expected"


_REPEAT_S = 1.0

Line = Callable[[Mapping[str, Any]], Awaitable[None]]


@asynccontextmanager
async def _progress(office: Office, request: RequestId, line: Line) -> AsyncIterator[None]:
    """Write a line at every decision about one request, and every second while it waits."""
    decisions: Queue[Decided] = Queue()
    office.history.watch(request, decisions.put_nowait)
    writing = get_running_loop().create_task(_write_lines(office, request, line, decisions))
    try:
        yield
    finally:
        office.history.unwatch(request, decisions.put_nowait)
        writing.cancel()


async def _write_lines(
    office: Office, request: RequestId, line: Line, decisions: Queue[Decided]
) -> None:
    while True:
        await line(_waits(office, request))
        try:
            async with time_limit(_REPEAT_S):
                action = (await decisions.get()).action
        except TimeoutError:
            continue
        if isinstance(action, EnqueueLocally):
            await line({"state": "queued", "slot": action.slot, "rule": action.rule})


def _waits(office: Office, request: RequestId) -> Mapping[str, Any]:
    waits_for: str = "any GPU" if office.has_gpus else "a GPU to attach"
    pending = office.core.requests.get(request)
    if office.has_gpus and pending is not None and pending.standing is Standing.LOCAL:
        waits_for = pending.at or waits_for
    return {"state": "waiting", "for": waits_for, "waiting": office.core.cluster.queued}
