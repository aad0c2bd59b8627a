"""Async functions and scaling in a whole gateway, with instances that a test controls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.model import Deployment, FunctionId
from tests.kit.engines.nats_servers import nats_server
from tests.kit.fakes.fake_function import Behaviour, FakeFunction, Got, a_function, says, writes
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.waiting import eventually
from tests.kit.worlds.gateway_world import World, gateway_world

ECHO = FunctionId("openfaas-fn", "echo")
ZERO = {"com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "1s"}


@dataclass
class Stage:
    """A gateway whose provider starts instances that answer with `behave`, after `starts_s`."""

    world: World
    provider: MemoryProvider
    instances: list[FakeFunction]

    @property
    def got(self) -> list[Got]:
        return [got for instance in self.instances for got in instance.got]

    @property
    def scalings(self) -> list[int]:
        return [replicas for _, replicas in self.provider.scalings]

    async def jobs(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.world.get("/system/jobs")).body
        return found

    async def is_away(self) -> bool:
        return bool((await self.jobs())["away"])

    async def accepts(self) -> bool:
        return (await self.world.ask("POST", "/async-function/echo")).status == 202

    async def idle(self) -> None:
        async def is_idle() -> bool:
            found = await self.jobs()
            return not (found["calls"] or found["callbacks"])

        await eventually(is_idle, "no job is left")


@asynccontextmanager
async def a_stage(
    folder: Path, behave: Behaviour, *, starts_s: float = 0.0, **more: Any
) -> AsyncIterator[Stage]:
    instances: list[FakeFunction] = []
    async with AsyncExitStack() as exits:

        async def start(_: Deployment, name: str) -> FakeFunction:
            await asyncio.sleep(starts_s)
            instances.append(await exits.enter_async_context(a_function(behave, name)))
            return instances[-1]

        provider = MemoryProvider(start)
        usual = {"callback_allowed": ("127.0.0.1",)}
        async with gateway_world(folder, provider, **usual | more) as world:
            yield Stage(world, provider, instances)


@dataclass
class Receiver:
    """Where results are called back to."""

    url: str = ""
    got: list[Got] = field(default_factory=list)


@asynccontextmanager
async def a_receiver() -> AsyncIterator[Receiver]:
    async with a_function(says(), "receiver", tcp=True) as fake:
        yield Receiver("http://" + fake.endpoint.address.removeprefix("tcp:") + "/", fake.got)


async def test_async_call_is_made_once_and_called_back(tmp_path: Path) -> None:
    behave = says(b"result", 201, "content-type: a/b\r\n")
    async with a_stage(tmp_path, behave) as stage, a_receiver() as receiver:
        await stage.world.deploy("echo")
        headers = {"X-Callback-Url": receiver.url, "X-Call-Id": "mine"}
        said = await stage.world.ask(
            "POST", "/async-function/echo/a%20b?q=1", b"body", headers=headers, who=""
        )
        assert (said.status, said.body, said.headers["x-call-id"]) == (202, "", "mine")
        await stage.idle()
        (got,) = stage.got
        assert (got.method, got.target, got.body) == ("POST", "/a%20b?q=1", b"body")
        assert (got.header("x-call-id"), got.header("x-forwarded-for")) == ("mine", "127.0.0.1")
        (back,) = receiver.got
        assert (back.body, back.header("content-type")) == (b"result", "a/b")
        assert (back.header("x-call-id"), back.header("x-function-status")) == ("mine", "201")
        assert back.header("x-function-name") == "echo.openfaas-fn"
        assert float(back.header("x-duration-seconds") or -1) >= 0
        done = 'gpufaas_gateway_job_attempts_total{kind="callback",outcome="done"} 1.0'

        async def is_counted() -> bool:
            return done in (await stage.world.get("/metrics")).body.splitlines()

        await eventually(is_counted, "the callback is counted")


@pytest.mark.parametrize("on_nats", [False, True])
async def test_large_bodies_go_through_whole_and_none_is_left(
    tmp_path: Path, *, on_nats: bool
) -> None:
    body, result = bytes(range(256)) * 20_000, bytes(range(255)) * 13_000

    async def test(**more: Any) -> None:
        async with (
            a_stage(tmp_path / "state", says(result), **more) as stage,
            a_receiver() as receiver,
        ):
            await stage.world.deploy("echo")
            headers = {"X-Callback-Url": receiver.url, "X-Call-Id": "mine"}
            said = await stage.world.ask("POST", "/async-function/echo", body, headers=headers)
            assert said.status == 202
            await stage.idle()
            assert [got.body for got in stage.got] == [body]
            assert [got.body for got in receiver.got] == [result]
            assert (await stage.jobs())["bytes"] == 0

    if not on_nats:
        await test()
        assert list((tmp_path / "state" / "jobs" / "bodies").iterdir()) == []
        return
    with nats_server(tmp_path / "nats") as server:
        await test(queue=server.url)


async def test_gateway_serves_calls_and_tells_of_its_queue_when_nats_is_away(
    tmp_path: Path,
) -> None:
    with nats_server(tmp_path / "nats") as server:
        async with a_stage(tmp_path / "state", says(b"now"), queue=server.url) as stage:
            await stage.world.deploy("echo")
            server.kill()
            await eventually(stage.is_away, "the queue is away")
            refused = await stage.world.ask("POST", "/async-function/echo", b"x")
            assert refused.status == 503
            assert "cannot be reached" in refused.body
            assert (await stage.world.ask("POST", "/function/echo", b"x")).body == "now"
            metrics = (await stage.world.get("/metrics")).body
            assert "gpufaas_gateway_jobs_queue_away 1" in metrics
            server.start()
            await eventually(stage.accepts, "a call is accepted")
            await stage.idle()


async def test_jobs_want_credentials_and_calls_do_not(tmp_path: Path) -> None:
    async with a_stage(tmp_path, says()) as stage:
        assert (await stage.world.get("/system/jobs", who="")).status == 401
        assert (await stage.world.get("/system/jobs/dead", who="")).status == 401
        missing = await stage.world.ask("POST", "/async-function/none", b"", who="")
        assert missing.status == 404


async def test_refusal_whose_body_nobody_reads_frees_the_instance(tmp_path: Path) -> None:
    # The next attempt comes late enough for a test that is held up before it looks.
    head = b"HTTP/1.1 503 X\r\nretry-after: 9\r\ntransfer-encoding: chunked\r\n\r\n"
    refused = writes(head + b"3\r\nno.\r\n", 0.3, b"0\r\n\r\n")
    fine = says()
    count = 0

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await (refused if count == 1 else fine)(got, writer)

    async with a_stage(tmp_path, behave) as stage:
        await stage.world.deploy("echo", annotations={"com.gpufaas.concurrency": "1"})
        await stage.world.ask("POST", "/async-function/echo", b"body")
        await eventually(lambda: count == 1)
        function = stage.world.gateway.functions.by_id(ECHO)
        assert function is not None
        await eventually(lambda: not function.inflight)
        assert count == 1, "it is free before the next attempt"
        await stage.idle()
        assert count == 2
        assert not function.inflight


async def test_job_that_a_gateway_left_is_made_by_the_next_one(tmp_path: Path) -> None:
    async with a_stage(tmp_path, says(delay_s=60.0)) as stage:
        await stage.world.deploy("echo")
        await stage.world.ask("POST", "/async-function/echo", b"x" * (2 << 20))
        await eventually(lambda: stage.got)
        assert (await stage.jobs())["running"] == 1
    async with a_stage(tmp_path, says()) as stage:
        await stage.world.deploy("echo")
        await stage.idle()
        assert stage.got[-1].body == b"x" * (2 << 20)
        assert (await stage.jobs())["dead"] == 0


async def test_job_of_a_function_that_is_gone_is_tried_and_then_a_dead_letter(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path, says(status=503), async_attempts=2) as stage:
        await stage.world.deploy("echo")
        await stage.world.ask("POST", "/async-function/echo", b"")
        await eventually(lambda: stage.got)
        await stage.world.ask("DELETE", "/system/functions", {"functionName": "echo"})
        await stage.idle()
        (letter,) = (await stage.world.get("/system/jobs/dead")).body
        assert "not deployed" in letter["why"]


async def test_hundred_callers_wake_a_function_with_one_order(tmp_path: Path) -> None:
    async with a_stage(tmp_path, says(), starts_s=0.3) as stage:
        await stage.world.deploy("echo", labels=ZERO)
        await eventually(lambda: stage.scalings == [0])
        calls = (stage.world.get("/function/echo", who="") for _ in range(100))
        said = await asyncio.gather(*calls)
        assert {one.status for one in said} == {200}
        assert stage.scalings[:2] == [0, 1]
        assert stage.scalings.count(1) == 1


async def test_async_call_wakes_a_function_that_sleeps_again_afterwards(tmp_path: Path) -> None:
    async with a_stage(tmp_path, says(delay_s=2.5), every_s=0.1) as stage:
        await stage.world.deploy("echo", labels=ZERO)
        await eventually(lambda: stage.scalings == [0])
        await stage.world.ask("POST", "/async-function/echo", b"")
        await eventually(lambda: stage.got)
        await stage.idle()
        assert stage.scalings[:2] == [0, 1]
        assert len(stage.got) == 1
        await eventually(lambda: stage.scalings == [0, 1, 0])


async def test_load_starts_replicas(tmp_path: Path) -> None:
    labels = {"com.openfaas.scale.target": "1", "com.openfaas.scale.proportion": "1.0"}

    async with a_stage(tmp_path, says(delay_s=1.0), every_s=0.1) as stage:
        await stage.world.deploy("echo", labels=labels)
        calls = (stage.world.get("/function/echo", who="") for _ in range(6))
        said = await asyncio.gather(*calls)
        assert {one.status for one in said} == {200}
        assert stage.scalings[0] == 2
