"""GET /system/logs: lines at once, until the log ends or its reader leaves."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway_ext.model import FunctionId, LogLine
from gateway_ext.ports import LogQuery
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.worlds.gateway_world import World, gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

F = FunctionId("openfaas-fn", "f")
AT = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)


def line(text: str) -> LogLine:
    return LogLine(F, "f-1", AT, text)


def shown(text: str) -> dict[str, Any]:
    return {
        "name": "f",
        "namespace": "openfaas-fn",
        "instance": "f-1",
        "timestamp": "2026-01-02T03:04:05.000678Z",
        "text": text,
    }


async def following(world: World, query: str = "name=f&follow=1") -> aiohttp.ClientResponse:
    credentials = world.gateway.credentials
    assert credentials is not None
    headers = {"Authorization": credentials.header}
    return await world.session.get(f"{world.gateway.url}/system/logs?{query}", headers=headers)


async def test_lines_that_there_are_come_as_json_lines(tmp_path: Path) -> None:
    provider = MemoryProvider()
    provider.lines = [line("one"), line("zwei, naïve\tand \u2028 odd")]
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        result = await world.get("/system/logs?name=f")
        assert result.headers["content-type"] == "application/x-ndjson"
        found = [json.loads(each) for each in result.body.split("\n") if each]
        assert found == [shown("one"), shown("zwei, naïve\tand \u2028 odd")]


@pytest.mark.parametrize(
    ("query", "meant"),
    [
        ("name=f", LogQuery(F)),
        ("name=f&tail=5&instance=f-1", LogQuery(F, "f-1", 5)),
        ("name=f&tail=-1&since=", LogQuery(F)),
        ("name=f&namespace=openfaas-fn&tail=0", LogQuery(F)),
        ("name=f.openfaas-fn&follow=false", LogQuery(F)),
        (
            "name=f&since=2026-01-02T03%3A04%3A05.123456789Z",
            LogQuery(F, since=datetime(2026, 1, 2, 3, 4, 5, 123456, UTC)),
        ),
    ],
)
async def test_a_query_is_understood(query: str, meant: LogQuery, tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        assert (await world.get(f"/system/logs?{query}")).status == 200
        assert provider.queries == [meant]


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 422), ("name=", 422), ("name=a/b", 422), ("name=f&tail=many", 422),
     ("name=f&since=yesterday", 422), ("name=f&since=2026-01-02T03:04:05", 422),
     ("name=absent", 404)],
)  # fmt: skip
async def test_a_query_that_makes_no_sense_is_refused(
    query: str, status: int, tmp_path: Path
) -> None:
    async with gateway_world(tmp_path) as world:
        await world.deploy("f")
        result = await world.get(f"/system/logs?{query}")
        assert result.status == status
        assert result.headers["content-type"].startswith("text/plain")


async def test_a_follower_sees_the_answer_begin_and_every_line_at_once(tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        async with await following(world) as answer:
            assert answer.status == 200
            for text in ("a", "b", "c"):
                await provider.write(line(text))
                assert json.loads(await answer.content.readline()) == shown(text)


async def test_a_reader_that_leaves_ends_the_providers_work(tmp_path: Path) -> None:
    ended = asyncio.Event()

    class Watched(MemoryProvider):
        async def logs(self, query: LogQuery) -> Any:
            try:
                async for each in super().logs(query):
                    yield each
            finally:
                ended.set()

    provider = Watched()
    provider.lines = [line("a")]
    async with gateway_world(tmp_path, provider) as world:
        await world.deploy("f")
        async with await following(world) as answer:
            await answer.content.readline()
            assert not ended.is_set()
        await ended.wait()


async def test_followers_do_not_hold_the_gateways_end_up(tmp_path: Path) -> None:
    provider = MemoryProvider()
    provider.lines = [line("a")]
    loop = asyncio.get_running_loop()
    async with gateway_world(tmp_path, provider, drain_s=20.0) as world:
        await world.deploy("f")
        answer = await following(world)
        await answer.content.readline()
        reading = asyncio.create_task(answer.read())
        began_s = loop.time()
        await world.gateway.__aexit__(None, None, None)
        assert loop.time() - began_s < 15
        assert await reading == b""
