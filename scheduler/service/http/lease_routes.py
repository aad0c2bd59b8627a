"""The routes that every caller takes, as plain ASGI: leases, and the presence of their holders."""

from asyncio import CancelledError, Queue, Task, current_task, get_running_loop, wait
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from pydantic_core import from_json, to_json

from cache_manager import exits
from cache_manager.model.ids import ModelId, NodeId
from common.http import asgi
from common.http.asgi import Receive, Scope, Send, until_disconnected
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
from scheduler.service.request_bounds import LONGEST_NAME, MOST_MODELS, MOST_S, MOST_WHOLE, is_name
from scheduler.service.scheduler_service import SchedulerService

MOST_BODY_BYTES = 1 << 20
_JSON = (b"content-type", b"application/json")
_LINES = (b"content-type", b"application/jsonl")
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()
_EMPTY = {"type": "http.response.body"}
_CALLER = b"x-gpufaas-caller"
# A caller knows by these that the leader lives.
_BEAT_S = 1.0
_BEAT = {"type": "http.response.body", "body": b"\n", "more_body": True}


class HotPath:
    """Serves the routes of `routes` and no other."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
        self._access = service.access
        self._meters = service.meters
        self._callers = service.leases
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
        office = self._service.office()
        body = await _body(scope, receive)
        request = acquire(body, office.clock.now_s())
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
        office = self._service.office()
        request_id = request(await _body(scope, receive))
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
        office = self._service.office()
        released = release(await _body(scope, receive))
        office.driver.report(released)
        self._callers.released(released.lease, released.request)
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
        term, addresses, token = self._service.signed(placement, request)
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
            self._service.office()
        except NotLeading as moved:
            return moved
        return NotLeading(None)


def unknown_caller() -> CallerNotAllowed:
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


_ACQUIRE = frozenset(
    {
        "request",
        "function",
        "models",
        "batch",
        "deadline_in_s",
        "waited_s",
        "priority",
        "application",
        "stage",
        "slo_s",
        "near",
        "registered_only",
        "max_wait_s",
        "exit_rule",
    }
)
_MOST_LEASES = 4_096

Fields = dict[str, Any]


def acquire(body: bytes, now_s: float) -> Request:
    """The request; its body's times are relative, its own times are the scheduler's."""
    fields = _fields(body, _ACQUIRE)
    models = fields.get("models")
    if not isinstance(models, list) or not 0 < len(models) <= MOST_MODELS:
        raise MalformedRequest(f"models: from 1 to {MOST_MODELS} names")
    deadline_in_s = _seconds(fields, "deadline_in_s")
    waited_s = _seconds(fields, "waited_s")
    near = _text(fields, "near", None)
    registered_only = fields.get("registered_only", False)
    if not isinstance(registered_only, bool):
        raise MalformedRequest("registered_only: true or false")
    exit_rule = _text(fields, "exit_rule", None)
    if exit_rule and not exits.is_rule(exit_rule):
        raise MalformedRequest(f"exit_rule: {exit_rule[:80]!r} is no exit rule")
    return Request(
        id=RequestId(_name(fields, "request")),
        function=_name(fields, "function"),
        models=tuple([ModelId(_checked_name("models", model)) for model in models]),
        batch=_whole(fields, "batch", 1, least=1),
        deadline_s=None if deadline_in_s is None else now_s + deadline_in_s,
        priority=_whole(fields, "priority", 0),
        arrived_s=now_s if waited_s is None else max(0.0, now_s - waited_s),
        application=_text(fields, "application", "") or "",
        stage=_text(fields, "stage", "") or "",
        slo_s=_seconds(fields, "slo_s"),
        near=None if near is None else NodeId(near),
        registered_only=registered_only,
        max_wait_s=_seconds(fields, "max_wait_s"),
        exit_rule=exit_rule,
    )


def request(body: bytes) -> RequestId:
    """The id of the request that asks for another lease, or is cancelled."""
    return RequestId(_name(_fields(body, frozenset({"request"})), "request"))


def release(body: bytes) -> LeaseReleased:
    fields = _fields(body, frozenset({"lease", "may_return", "request"}))
    may_return = fields.get("may_return", False)
    if not isinstance(may_return, bool):
        raise MalformedRequest("may_return: true or false")
    if "lease" not in fields:
        raise MalformedRequest("lease: missing")
    request = _text(fields, "request", None)
    named = None if request is None else RequestId(request)
    return LeaseReleased(LeaseId(_whole(fields, "lease", 0, least=1)), may_return, named)


def presence(body: bytes) -> tuple[str, tuple[LeaseId, ...]]:
    """The name under which a caller acquires leases, and the leases that it holds already."""
    fields = _fields(body, frozenset({"caller", "leases"}))
    leases = fields.get("leases", [])
    if not isinstance(leases, list) or len(leases) > _MOST_LEASES:
        raise MalformedRequest(f"leases: a list of at most {_MOST_LEASES} numbers")
    if not all(type(lease) is int for lease in leases):
        raise MalformedRequest("leases: whole numbers")
    return _name(fields, "caller"), tuple(map(LeaseId, leases))


def _fields(body: bytes, known: frozenset[str]) -> Fields:
    try:
        fields = from_json(body)
    except ValueError as error:
        raise MalformedRequest(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedRequest("a JSON object is expected")
    if not fields.keys() <= known:
        strangers = ", ".join(sorted(fields.keys() - known))
        raise MalformedRequest(f"unknown: {strangers}; known: {', '.join(sorted(known))}")
    return fields


def _name(fields: Fields, field: str) -> str:
    if field not in fields:
        raise MalformedRequest(f"{field}: missing")
    return _checked_name(field, fields[field])


def _checked_name(field: str, value: object) -> str:
    if not isinstance(value, str) or not is_name(value):
        wanted = f"a text of 1 to {LONGEST_NAME} printable characters"
        raise MalformedRequest(f"{field}: {wanted} is expected")
    return value


def _text(fields: Fields, field: str, missing: str | None) -> str | None:
    value = fields.get(field)
    return missing if value is None else _checked_name(field, value) if value else missing


def _whole(fields: Fields, field: str, missing: int, least: int | None = None) -> int:
    value = fields.get(field, missing)
    if (
        type(value) is not int
        or not (-MOST_WHOLE if least is None else least) <= value <= MOST_WHOLE
    ):
        raise MalformedRequest(
            f"{field}: a whole number{'' if least is None else f' from {least}'}"
        )
    return value


def _seconds(fields: Fields, field: str) -> float | None:
    value = fields.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedRequest(f"{field}: seconds")
    if not 0.0 <= value <= MOST_S:  # nor is NaN
        raise MalformedRequest(f"{field}: from 0 to {MOST_S:g} seconds")
    return float(value)


_REPEAT_S = 1.0

Line = Callable[[Mapping[str, Any]], Awaitable[None]]


class WaitProgress:
    """Writes a line at every decision about one request, and every second while it waits."""

    def __init__(self, office: Office, request: RequestId, line: Line) -> None:
        self._office = office
        self._request = request
        self._line = line
        self._decisions: Queue[Decided] = Queue()
        self._writing: Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._office.history.watch(self._request, self._decisions.put_nowait)
        self._writing = get_running_loop().create_task(self._write_lines())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._office.history.unwatch(self._request, self._decisions.put_nowait)
        assert self._writing is not None
        self._writing.cancel()
        self._writing = None  # a cancelled task refers to all that it worked with

    async def _write_lines(self) -> None:
        while True:
            await self._line(self._waits())
            try:
                async with time_limit(_REPEAT_S):
                    decided = await self._decisions.get()
            except TimeoutError:
                continue
            if isinstance(decided.action, EnqueueLocally):
                await self._line(_queued(decided.action))

    def _waits(self) -> Mapping[str, Any]:
        core = self._office.core
        pending = core.requests.get(self._request)
        local = pending is not None and pending.standing is Standing.LOCAL
        queued = core.placer.queued
        if not self._office.has_gpus:
            return {"state": "waiting", "for": "a GPU to attach", "waiting": queued}
        at = pending.at if pending is not None and local else None
        return {"state": "waiting", "for": at or "any GPU", "waiting": queued}


def _queued(action: EnqueueLocally) -> Mapping[str, Any]:
    return {"state": "queued", "slot": action.slot, "rule": action.rule}
