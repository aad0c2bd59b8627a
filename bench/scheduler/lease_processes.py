"""The processes of the scheduler's bench: servers of several kinds, and a node."""

import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from enum import StrEnum

from bench.measure.child_process import ChildProcess, ParentPipe, child_process
from bench.measure.instant_node import InstantNode
from common.http.asgi import App, Receive, Scope, Send
from gpu_manager.attachment.attachment import Attachment
from scheduler.service.http.app import listen, make_app, serving
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Serving, Settings
from tests.kit.nodes.attaching import attach_in_process

GPUS = 8
SECRET = b"the secret of the scheduler's bench"
_ATTACHED_S, _LOOK_S = 20.0, 0.05


class LeaseServer(StrEnum):
    """The server that answers the clients, and how they ask it."""

    BARE = "uvicorn that only answers, HTTP"
    HTTP = "the scheduler, HTTP"
    CALLERS = "the scheduler, a caller's stream"
    PLAIN = "the same, decisions without candidates"
    NODE = "the same, its node on a stream too"


@contextmanager
def lease_server(kind: LeaseServer) -> Iterator[ChildProcess]:
    """A server process, with a node process where the kind has one; its GPUs are there."""
    with ExitStack() as stack:
        server = stack.enter_context(child_process(_serve, kind))
        if kind is LeaseServer.NODE:
            stack.enter_context(child_process(_stream_node, server.address))
        if kind is not LeaseServer.BARE:
            _wait_for_gpus(server)
        yield server


def _wait_for_gpus(server: ChildProcess) -> None:
    patience_s = time.monotonic() + _ATTACHED_S
    while server.ask("gpus") < GPUS:
        assert time.monotonic() < patience_s, "the node does not attach"
        time.sleep(_LOOK_S)


# -- servers ------------------------------------------------------------------------------------


async def _serve(parent: ParentPipe, kind: LeaseServer) -> None:
    """Serve until the parent closes the pipe; every order asks how many GPUs there are."""
    async with AsyncExitStack() as stack:
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if kind is LeaseServer.BARE:
            await stack.enter_async_context(serving(_bare, listener))
            parent.ready(url)
            await parent.order()
            return
        slots = 0 if kind in {LeaseServer.PLAIN, LeaseServer.NODE} else GPUS
        service = SchedulerService(
            Settings(scheduler=Serving(explain_slots=slots)), SECRET, "bench", url
        )
        office = await stack.enter_async_context(service.lead(1))
        if kind is not LeaseServer.NODE:
            attach_in_process(office.driver, InstantNode("node", GPUS))
        app: App = make_app(service)
        streams = service.serve_stream
        await stack.enter_async_context(serving(app, listener, streams=streams))
        parent.ready(url)
        while await parent.order() is not None:
            parent.answer(len(office.driver.status().gpus))


_LEASE = json.dumps({"lease": 1, "filled": "x" * 380}).encode()
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_LEASE))]


async def _bare(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with as many bytes as the scheduler does, and decide nothing."""
    await receive()
    if scope["path"] == "/acquire":
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _LEASE})
    else:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


async def _stream_node(parent: ParentPipe, url: str) -> None:
    """A GPU manager's end of a node stream, until the parent closes the pipe."""
    node = InstantNode("node", GPUS)
    attachment = Attachment([url], node.name, SECRET)
    node.reports = attachment
    attachment.attach(node.name, node)
    parent.ready()
    await parent.order()
    attachment.detach(node.name)
    await attachment.close()
