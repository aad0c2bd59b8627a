"""The processes of the scheduler's bench: servers of several kinds, a node, and the clients."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median, quantiles

from bench.measure.child_process import ChildProcess, ParentPipe, child_process
from bench.measure.instant_node import InstantNode
from bench.measure.load_figures import LoadFigures
from common.http.asgi import App, Receive, Scope, Send
from gpu_manager.attachment.attachment import Attachment
from scheduler.service.http.access import ApiRole, token
from scheduler.service.http.scheduler_server import listen, serving
from scheduler.service.scheduler_service import SchedulerService
from scheduler.service.settings import Serving, Settings
from testbed.nodes.attaching import attach_in_process

GPUS = 8
MODELS = 8
_SECRET = b"the secret of the scheduler's bench"
_ATTACHED_S, _LOOK_S = 20.0, 0.05


class LeaseServer(StrEnum):
    """The server that answers the clients."""

    BARE = "uvicorn that only answers"
    OURS = "the scheduler"
    PLAIN = "the scheduler, decisions without candidates"
    STREAM = "the scheduler, its node on a stream"


@dataclass(frozen=True, slots=True)
class LeaseLoad:
    """The number of clients, and the seconds for which each acquires and releases leases."""

    clients: int
    seconds: float


@contextmanager
def lease_server(kind: LeaseServer) -> Iterator[ChildProcess]:
    """A server process, with a node process where the kind has one; its GPUs are there."""
    with ExitStack() as stack:
        server = stack.enter_context(child_process(_serve, kind))
        if kind is LeaseServer.STREAM:
            stack.enter_context(child_process(_stream_node, server.address))
        if kind is not LeaseServer.BARE:
            _wait_for_gpus(server)
        yield server


@contextmanager
def lease_clients() -> Iterator[ChildProcess]:
    """A process of clients; it answers the URL of a server and a LeaseLoad with LoadFigures."""
    with child_process(_put_loads) as clients:
        yield clients


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
        slots = 0 if kind is LeaseServer.PLAIN else GPUS
        service = SchedulerService(
            Settings(scheduler=Serving(explain_slots=slots)), _SECRET, "bench", url
        )
        office = await stack.enter_async_context(service.lead(1))
        if kind is not LeaseServer.STREAM:
            attach_in_process(office.driver, InstantNode("node", GPUS))
        app: App = service.app
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
    attachment = Attachment([url], node.name, _SECRET)
    node.reports = attachment
    attachment.attach(node.name, node)
    parent.ready()
    await parent.order()
    attachment.detach(node.name)
    await attachment.close()


# -- clients ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LeaseTimings:
    """What the clients of one load saw: the seconds of each acquire, and the pairs completed."""

    acquires_s: list[float] = field(default_factory=list)
    pairs: int = 0


async def _put_loads(parent: ParentPipe) -> None:
    parent.ready()
    while (order := await parent.order()) is not None:
        parent.answer(await _figures(*order))


async def _figures(url: str, load: LeaseLoad) -> LoadFigures:
    """The figures of pairs of acquire and release; the latency is that of the acquire."""
    port, seen = int(url.rpartition(":")[2]), _LeaseTimings()
    began_s, processor_s = time.perf_counter(), time.process_time()
    until_s = began_s + load.seconds
    await asyncio.gather(*(_client(port, number, until_s, seen) for number in range(load.clients)))
    elapsed_s = time.perf_counter() - began_s
    return LoadFigures(
        rate=seen.pairs / elapsed_s,
        p50_s=median(seen.acquires_s),
        p99_s=quantiles(seen.acquires_s, n=100)[98],
        failed=0,
        generator=(time.process_time() - processor_s) / elapsed_s,
    )


async def _client(port: int, number: int, until_s: float, seen: _LeaseTimings) -> None:
    """Write HTTP by hand: a client library would cost more than what is measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bearer = token(_SECRET, ApiRole.CALLER).encode()

    async def post(path: bytes, body: bytes) -> bytes:
        head = b"POST %s HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %s\r\n"
        length = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head % (path, bearer) + length + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if answer.startswith(b"http/1.1 204"):
            return b""
        assert answer.startswith(b"http/1.1 200"), answer
        _, _, rest = answer.partition(b"content-length: ")
        return await reader.readexactly(int(rest[: rest.index(b"\r")]))

    asked = 0
    while (now_s := time.perf_counter()) < until_s:
        asked += 1
        model = (number + asked) % MODELS
        request = b'{"request":"c%d-%d","function":"bench/f","models":["m%d"]}'
        answer = await post(b"/acquire", request % (number, asked, model))
        seen.acquires_s.append(time.perf_counter() - now_s)
        await post(b"/release", b'{"lease":%d}' % json.loads(answer)["lease"])
        seen.pairs += 1
    writer.close()
