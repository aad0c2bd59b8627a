"""The HTTP server's own transports: an answer is one piece, and nothing waits for ever."""

import asyncio
import gc
import socket
import weakref

import pytest

from common.http.asgi import Receive, Scope, Send
from scheduler.model.events import GpuDraining, NodeHeard, NodeSilent
from scheduler.service.http.app import listen, serving
from tests.kit.cores.builders import gpu
from tests.kit.nodes.fake_node import fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import a_world, leading

pytestmark = pytest.mark.timeout(180, func_only=True)


async def answered(path: str, method: bytes = b"GET") -> list[bytes]:
    """The pieces in which an application's answer comes, by one read each."""
    listener = listen("127.0.0.1", 0)
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        await _answer(scope, send, begun)

    async with serving(app, listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(method + b" %s HTTP/1.1\r\nhost: here\r\n\r\n" % path.encode())
        pieces: list[bytes] = []
        while b"end" not in b"".join(pieces):
            pieces.append(await reader.read(65536))
            begun.set()
        writer.close()
        return pieces


async def _answer(scope: Scope, send: Send, begun: asyncio.Event) -> None:
    """Answer by the path; a late body comes when its client has read the beginning."""
    headers = [(b"x-is", b"end" if scope["path"] in {"/empty", "/head"} else b"begun")]
    if scope["path"] == "/whole":
        headers.append((b"content-length", b"3"))
    status = 204 if scope["path"] == "/empty" else 200
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if scope["path"] == "/late":
        await begun.wait()
    await send({"type": "http.response.body", "body": b"" if status == 204 else b"end"})


async def test_head_and_body_come_in_one_piece() -> None:
    (piece,) = await answered("/whole")
    assert piece.startswith(b"HTTP/1.1 200")
    assert piece.endswith(b"\r\n\r\nend")


async def test_head_comes_at_once_when_the_body_is_late() -> None:
    first, *_ = await answered("/late")
    assert first.startswith(b"HTTP/1.1 200")
    assert b"end" not in first


async def test_answer_comes_when_it_has_no_body() -> None:
    (empty,) = await answered("/empty")
    assert empty.startswith(b"HTTP/1.1 204")
    (head,) = await answered("/head", b"HEAD")
    assert head.startswith(b"HTTP/1.1 200")


async def test_request_waits_when_the_only_gpu_is_silent() -> None:
    """The request is not refused for want of a GPU: the silent one may return in a moment."""
    async with leading(attach_grace_s=0.0) as world:
        assert world.office is not None
        driver = world.office.driver
        driver.report(NodeSilent(gpu("g0", node="n0").node))
        asking = asyncio.create_task(world.acquire("r0"))
        await asyncio.sleep(0.1)
        assert not asking.done()
        driver.report(NodeHeard(gpu("g0", node="n0").node))
        assert (await asking).status == 200


async def test_request_is_refused_when_the_only_gpu_drains_on_a_silent_node() -> None:
    """The GPU will not take requests again, even if its node reports."""
    async with leading(attach_grace_s=0.0) as world:
        assert world.office is not None
        await world.acquire("r0")  # its lease keeps the GPU there
        world.office.driver.report(NodeSilent(gpu("g0", node="n0").node))
        world.office.driver.report(GpuDraining(gpu("g0").id))
        assert (await world.acquire("r1")).body["error"] == "no-gpus"


async def test_request_is_refused_when_the_silent_gpu_was_given_up() -> None:
    async with a_world(attach_grace_s=0.0) as world, world.service.lead(1) as world.office:
        world.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
        node = gpu("g0", node="n0").node
        world.office.driver.report(NodeSilent(node))
        world.office.driver.detach(node)
        assert (await world.acquire("r0")).body["error"] == "no-gpus"


def test_listener_has_the_connections_of_silent_hosts_closed() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle_s, every_s, times = (
                accepted.getsockopt(socket.IPPROTO_TCP, each) for each in options
            )
            assert idle_s + every_s * times <= 30


async def test_scheduler_that_stopped_is_freed_with_its_routes() -> None:
    async with leading() as world:
        assert (await world.get("/policy")).status == 200
        service = weakref.ref(world.service)
    del world

    def is_freed() -> bool:
        gc.collect()
        return service() is None

    await eventually(is_freed, "the service is freed")
