"""The tiny server for Prometheus and health checks.

That ambiguous requests are refused is common.http's work, and tested at the gateway's port.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gpu_manager.errors import BadSetting
from gpu_manager.server.exporter import Exporter
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)


@asynccontextmanager
async def exporter(
    metrics: Callable[[], bytes] = lambda: b"a 1.0\n", trouble: str = ""
) -> AsyncIterator[Exporter]:
    found = Exporter(metrics, lambda: trouble)
    await found.start("127.0.0.1", 0)
    try:
        yield found
    finally:
        await found.stop()


async def ask(found: Exporter, text: bytes) -> bytes:
    """Everything that comes until the end."""
    reader, writer = await asyncio.open_connection(*found.address)
    writer.write(text)
    try:
        return await reader.read()
    finally:
        writer.close()


async def get(found: Exporter, path: str, method: str = "GET") -> tuple[int, bytes]:
    head, _, body = (
        await ask(found, f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    ).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_metrics_and_health_are_answered() -> None:
    async with exporter() as found:
        assert await get(found, "/metrics?x=1") == (200, b"a 1.0\n")
        assert await get(found, "/healthz") == (200, b"alive\n")
        assert await get(found, "/readyz") == (200, b"ready\n")
        assert (await get(found, "/"))[0] == 404


async def test_head_has_no_body_but_its_length() -> None:
    async with exporter() as found:
        said = await ask(found, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert said.endswith(b"\r\n\r\n")
        assert b"content-length: 6\r\n" in said


async def test_node_that_is_of_no_use_is_not_ready_and_says_why() -> None:
    async with exporter(trouble="every GPU is lost") as found:
        assert await get(found, "/readyz") == (503, b"every GPU is lost\n")
        assert (await get(found, "/healthz"))[0] == 200


async def test_nothing_is_changed_by_anybody() -> None:
    async with exporter() as found:
        assert (await get(found, "/metrics", "POST"))[0] == 405


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nx: " + b"x" * 20_000, b"431"),
    ],
)
async def test_invalid_request_is_refused(text: bytes, status: bytes) -> None:
    async with exporter() as found:
        assert (await ask(found, text)).startswith(b"HTTP/1.1 %b " % status)
        assert (await get(found, "/healthz"))[0] == 200


async def test_client_that_leaves_or_says_nothing_is_let_go_when_it_stops() -> None:
    found = Exporter(lambda: b"", lambda: "")
    await found.start("127.0.0.1", 0)
    _, silent = await asyncio.open_connection(*found.address)
    _, gone = await asyncio.open_connection(*found.address)
    gone.write(b"GET /met")
    gone.close()
    assert (await get(found, "/healthz"))[0] == 200
    await found.stop()
    silent.close()
    assert len(asyncio.all_tasks()) == 1


async def test_oldest_client_makes_room_when_too_many_say_nothing() -> None:
    async with exporter() as found:
        silent = [await asyncio.open_connection(*found.address) for _ in range(32)]
        assert await get(found, "/healthz") == (200, b"alive\n")
        assert await silent[0][0].read() == b""
        _, second = silent[1]
        second.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await silent[1][0].read()).startswith(b"HTTP/1.1 200 ")
        for _, writer in silent:
            writer.close()


async def test_newest_are_kept_when_very_many_come_at_once() -> None:
    async with exporter() as found:
        many = await asyncio.gather(*(asyncio.open_connection(*found.address) for _ in range(90)))
        assert await get(found, "/healthz") == (200, b"alive\n")
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in many]
        await eventually(lambda: sum(each.done() for each in ended) >= 90 - 31)
        assert sum(each.done() for each in ended) == 90 - 31
        for _, writer in many:
            writer.close()
        await asyncio.wait(ended)
        assert all(each.result() == b"" for each in ended)


async def test_port_that_is_taken_is_an_error() -> None:
    async with exporter() as found:
        with pytest.raises(BadSetting, match=r"metrics '127.0.0.1:\d+': Address"):
            await Exporter(lambda: b"", lambda: "").start(*found.address)
