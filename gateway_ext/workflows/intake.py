"""POST /workflow/NAME[.NAMESPACE][?query]: runs a workflow while its client waits."""

import time
from dataclasses import dataclass
from uuid import uuid4

from common.http.asgi import (
    Header,
    Receive,
    Scope,
    Send,
    announced_bytes,
    header_in,
    send_text,
    until_disconnected,
)
from common.tasks import until_first
from gateway_ext.calls.invoke import StreamedResponse
from gateway_ext.calls.passed_headers import CALL_ID, DURATION, START_TIME, BrowserGuard, call_id_in
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import BadRequest, CallerGone, GatewayError, TooLarge, WrongMethod
from gateway_ext.jobs.intake import read_body
from gateway_ext.model import DEFAULT_NAMESPACE
from gateway_ext.workflows.errors import UnknownWorkflow
from gateway_ext.workflows.limits import RunShare
from gateway_ext.workflows.plan import WorkflowPlan
from gateway_ext.workflows.runs import WorkflowCalls
from gateway_ext.workflows.table import Workflows

PREFIX = b"/workflow/"

_OURS = frozenset({CALL_ID, START_TIME, DURATION})


@dataclass(frozen=True, slots=True)
class WorkflowIntake:
    """The ASGI application of /workflow/."""

    workflows: Workflows
    calls: WorkflowCalls
    guard: BrowserGuard
    body_s: float  # in which a body must arrive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves ends the run."""
        with self.calls.limits.share() as share:
            try:
                plan = self._plan(scope)
                body = await self._body(scope, receive, share)
            except CallerGone:
                return
            except GatewayError as error:
                await send_text(send, status_of(error), str(error), headers_of(error))
                return
            run = self._respond(plan, scope, body, share, send)
            await until_first(run, until_disconnected(receive))

    async def _respond(
        self, plan: WorkflowPlan, scope: Scope, body: bytes, share: RunShare, send: Send
    ) -> None:
        headers = _with_client(scope)
        call_id = _call_id(scope)
        own = (CALL_ID, call_id.encode("latin-1"))
        began_s, started = time.monotonic(), (START_TIME, b"%d" % time.time_ns())
        begun = False
        try:
            async with self.calls.call(
                plan, call_id, headers, scope["query_string"], body, share
            ) as answer:
                start = {"type": "http.response.start", "status": answer.status}
                shown = [header for header in answer.headers if header[0] not in _OURS]
                host = header_in(scope, b"host")
                took = (DURATION, b"%.6f" % (time.monotonic() - began_s))
                site = scope.get("raw_path") or scope["path"].encode()
                confined = self.guard.confine([*shown, own, started, took], host, site)
                begun = True
                await send({**start, "headers": confined})
                await _send_body(answer, send)
        except GatewayError as error:
            if not begun:  # else the answer is cut off, which tells the client
                await send_text(send, status_of(error), str(error), [*headers_of(error), own])

    def _plan(self, scope: Scope) -> WorkflowPlan:
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        name = raw.removeprefix(PREFIX)
        plan = self.workflows.by_path(name)
        if plan is None:
            if not name:
                raise BadRequest("the path names no workflow: it is /workflow/NAME")
            short, _, namespace = name.decode("latin-1").partition(".")
            raise UnknownWorkflow(namespace or DEFAULT_NAMESPACE, short)
        if scope["method"] != "POST":
            raise WrongMethod(scope["method"])
        return plan

    async def _body(self, scope: Scope, receive: Receive, share: RunShare) -> bytes:
        most_bytes = self.calls.limits.answer_bytes
        if announced_bytes(scope) > most_bytes:
            raise TooLarge(most_bytes)
        parts = bytearray()

        async def take(piece: bytes) -> None:
            share.hold(len(piece))  # bodies of many calls at once would fill the memory
            parts.extend(piece)

        await read_body(receive, take, most_bytes, self.body_s)
        return bytes(parts)


async def _send_body(answer: StreamedResponse, send: Send) -> None:
    # A write of no bytes sends the head at once.
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    async for piece in answer.body:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _call_id(scope: Scope) -> str:
    return call_id_in(header_in(scope, CALL_ID)).decode("latin-1") or str(uuid4())


def _with_client(scope: Scope) -> list[Header]:
    """The request's headers, with the client among those for whom it is forwarded."""
    headers: list[Header] = list(scope["headers"])
    client = scope.get("client")
    return [*headers, (b"x-forwarded-for", client[0].encode("latin-1"))] if client else headers
