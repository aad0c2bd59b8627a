"""A whole gateway keeps functions' answers apart from its own, and its password to itself."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from gateway_ext.calls.passed_headers import SANDBOX
from gateway_ext.model import Deployment
from gateway_ext.openfaas.basic_auth import BasicCredentials
from gateway_ext.sites import FOR_NO_PAGE
from tests.kit.fakes.fake_function import FakeFunction, Got, a_function, says
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.waiting import eventually
from tests.kit.worlds.gateway_world import USER, World, gateway_world

OTHER = BasicCredentials(USER, "another password").header


@asynccontextmanager
async def a_world(folder: Path, **more: Any) -> AsyncIterator[tuple[World, list[Got]]]:
    """A gateway with the function `page`, and what the function got."""
    instances: list[FakeFunction] = []
    got: list[Got] = []
    async with AsyncExitStack() as exits:

        async def start(_: Deployment, name: str) -> FakeFunction:
            answering = says(b"<p>", headers="content-type: text/html\r\nset-cookie: a=1\r\n")
            instances.append(await exits.enter_async_context(a_function(answering, name)))
            instances[-1].got = got
            return instances[-1]

        made = gateway_world(folder, MemoryProvider(start), **more)
        world = await exits.enter_async_context(made)
        await world.deploy("page")
        yield world, got


async def test_answers_of_functions_are_sandboxed_and_those_of_the_gateway_are_for_no_page(
    tmp_path: Path,
) -> None:
    async with a_world(tmp_path) as (world, _):
        said = await world.get("/function/page.openfaas-fn/x/y?z", who="")
        for name, value in SANDBOX:
            assert said.headers[name.decode()] == value.decode()
        assert said.headers["set-cookie"] == "a=1; Path=/function/page.openfaas-fn"
        for path in ("/system/functions", "/system/nothing", "/system/jobs"):
            shown = await world.get(path)
            assert [shown.headers[name.decode()].encode() for name, _ in FOR_NO_PAGE] == [
                value for _, value in FOR_NO_PAGE
            ]


async def test_own_password_reaches_no_function(tmp_path: Path) -> None:
    async with a_world(tmp_path) as (world, got):
        for who in ({}, {"who": OTHER}):
            for path in ("/function/page", "/async-function/page"):
                said = await world.ask("POST", path, b"", **who)
                assert said.status in {200, 202}
        await eventually(lambda: len(got) == 4, "all calls were made")
        shown = sorted(str(one.header("authorization")) for one in got)
        assert shown == sorted(["None", OTHER] * 2)


async def test_host_of_functions_has_nothing_else(tmp_path: Path) -> None:
    async with a_world(tmp_path, function_hosts=("functions.example",)) as (world, _):
        there = {"headers": {"Host": "functions.example:80"}}
        said = await world.get("/function/page", **there)
        assert (said.status, said.headers.get("content-security-policy")) == (200, None)
        assert said.headers["set-cookie"] == "a=1"
        for path in ("/system/functions", "/system/info", "/ui/", "/ui"):
            assert (await world.get(path, **there)).status == 404
        assert (await world.get("/system/functions")).status == 200
        assert "content-security-policy" in (await world.get("/function/page")).headers
