"""A gateway is killed with workflows under way: async ones are completed, few stages twice.

Alone, by the same gateway when it starts again; beside another one with the same queue, by that.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.kit.engines.nats_servers import nats_server
from tests.kit.fakes.fake_function import Got, a_function, says
from tests.kit.places import ROOT
from tests.kit.waiting import eventually

COUNT, FEWER = 500, 60
# A gateway's claims are released after 20 s without its heartbeat.
TAKEN_OVER_S = 120.0
WORKFLOW = b"""
workflow: w
stages:
  first: {function: a}
  left: {function: b, after: first}
  right: {function: b, after: first}
  last: {function: c, after: [left, right]}
"""


@dataclass
class Calls:
    """Functions that note what they were called for; `b` holds calls until it is let go."""

    began: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def first(self, got: Got, writer: asyncio.StreamWriter) -> None:
        self.began[str(got.header("x-call-id"))] += 1
        await says(b"x")(got, writer)

    async def held(self, got: Got, writer: asyncio.StreamWriter) -> None:
        await self.let_go.wait()
        await says(b"y")(got, writer)

    async def last(self, got: Got, writer: asyncio.StreamWriter) -> None:
        await says(b"z")(got, writer)
        if got.body == b'{"left":"y","right":"y"}':
            self.done[str(got.header("x-call-id"))] += 1


@dataclass
class Running:
    """A gateway's process, and a session for its URL."""

    process: asyncio.subprocess.Process
    session: aiohttp.ClientSession

    async def queue(self, call_id: str) -> None:
        headers = {"X-Call-Id": call_id}
        async with self.session.post("/async-workflow/w", headers=headers) as said:
            assert (said.status, said.headers["x-call-id"]) == (202, call_id)

    async def call(self) -> int | None:
        """The status of a call that waits; None if the connection broke."""
        try:
            async with self.session.post("/workflow/w", headers={"X-Call-Id": "sync"}) as said:
                return said.status
        except aiohttp.ClientError:
            return None

    async def has_no_jobs(self) -> bool:
        async with self.session.get("/system/jobs") as said:
            found = await said.json()
        return bool(found["calls"] == found["running"] == found["dead"] == 0)


@asynccontextmanager
async def a_gateway(
    folder: Path, functions: list[str], queue: str = "sqlite"
) -> AsyncIterator[Running]:
    """A gateway with functions at these addresses."""
    program = (sys.executable, "-m", "tests.kit.processes.workflow_process", str(folder), queue)
    process = await asyncio.create_subprocess_exec(*program, *functions, cwd=ROOT, stdout=PIPE)
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession(url) as session:
            yield Running(process, session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.slow
async def test_async_workflows_are_completed_when_the_gateway_is_killed(tmp_path: Path) -> None:
    calls = Calls()
    async with (
        a_function(calls.first, backlog=4096) as a,
        a_function(calls.held, backlog=4096) as b,
        a_function(calls.last, backlog=4096) as c,
    ):
        named = {"a": a, "b": b, "c": c}
        functions = [f"{name}={one.endpoint.address}" for name, one in named.items()]
        ids = [str(number) for number in range(COUNT)]
        async with a_gateway(tmp_path, functions) as gateway:
            async with gateway.session.post("/system/workflows", data=WORKFLOW) as said:
                assert said.status == 202, await said.text()
            waiting = asyncio.create_task(gateway.call())
            await asyncio.gather(*(gateway.queue(call_id) for call_id in ids))
            await eventually(lambda: len(b.got) == 2 * (COUNT + 1), "all of them are under way")
            gateway.process.kill()
            assert await waiting is None, "a client that waits learns of it"
        assert not calls.done
        calls.let_go.set()
        async with a_gateway(tmp_path, functions) as gateway:
            await eventually(lambda: len(calls.done) >= COUNT, "all are completed")
            await eventually(gateway.has_no_jobs, "the queue is empty")
    assert calls.done == Counter(ids)
    assert {calls.began[call_id] for call_id in ids} == {2}


@pytest.mark.slow
async def test_async_workflows_are_completed_by_another_gateway_when_one_is_killed(
    tmp_path: Path,
) -> None:
    calls = Calls()
    async with (
        a_function(calls.first, backlog=4096) as a,
        a_function(calls.held, backlog=4096) as b,
        a_function(calls.last, backlog=4096) as c,
    ):
        named = {"a": a, "b": b, "c": c}
        functions = [f"{name}={one.endpoint.address}" for name, one in named.items()]
        ids = [str(number) for number in range(FEWER)]
        with nats_server(tmp_path / "nats") as server:
            async with a_gateway(tmp_path / "one", functions, server.url) as one:
                async with one.session.post("/system/workflows", data=WORKFLOW) as said:
                    assert said.status == 202, await said.text()
                await asyncio.gather(*(one.queue(call_id) for call_id in ids))
                await eventually(lambda: len(b.got) == 2 * FEWER, "all of them are under way")
                # The other gateway knows of them, and of their workflow, by the servers alone.
                async with a_gateway(tmp_path / "other", functions, server.url) as other:
                    one.process.kill()
                    calls.let_go.set()
                    await eventually(
                        lambda: len(calls.done) >= FEWER, "all are completed", within_s=TAKEN_OVER_S
                    )
                    await eventually(other.has_no_jobs, "the queue is empty")
    assert calls.done == Counter(ids)
    assert {calls.began[call_id] for call_id in ids} == {2}
