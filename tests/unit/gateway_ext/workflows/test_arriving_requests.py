"""Requests of workflows while their bodies arrive: what they hold, and how long they may take."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fakes.fake_function import echoes
from tests.kit.waiting import eventually
from tests.kit.worlds.workflow_world import WorkflowWorld, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)

ECHO = "  only: {function: a}\n"
SMALL: dict[str, Any] = {"workflow_answer_bytes": 1000, "workflow_held_bytes": 1500}


async def slowly(first: bytes, go: asyncio.Event) -> AsyncIterator[bytes]:
    yield first
    await go.wait()
    yield b"!"


async def sent(flows: WorkflowWorld, body: AsyncIterator[bytes]) -> tuple[int, str]:
    url = f"{flows.world.gateway.url}/workflow/w"
    async with flows.world.session.post(url, data=body) as answer:
        return answer.status, await answer.text()


async def is_held(flows: WorkflowWorld, size_bytes: int) -> bool:
    lines = (await flows.world.get("/metrics")).body.splitlines()
    return f"gpufaas_gateway_workflow_bytes {float(size_bytes)}" in lines


async def test_body_that_arrives_is_held_and_is_no_run_yet(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with workflow_world(tmp_path, {"a": echoes}, workflow_runs=1, **SMALL) as flows:
        await flows.deploy(ECHO)
        first = asyncio.create_task(sent(flows, slowly(b"x" * 800, go)))
        await eventually(lambda: is_held(flows, 800), "it has arrived")

        status, why = await sent(flows, slowly(b"y" * 800, go))
        assert (status, why) == (429, "the workflows under way hold as much data as they may")
        assert (await flows.call(b"z" * 600)).status == 200, "no place is taken"
        go.set()
        assert await first == (200, "x" * 800 + "!")
        await eventually(lambda: is_held(flows, 0), "it is given back")


async def test_what_a_client_sent_that_left_is_given_back(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, {"a": echoes}, **SMALL) as flows:
        await flows.deploy(ECHO)
        leaves = asyncio.create_task(sent(flows, slowly(b"x" * 800, asyncio.Event())))
        await eventually(lambda: is_held(flows, 800), "it has arrived")
        leaves.cancel()
        await eventually(lambda: is_held(flows, 0), "it is given back")


async def test_body_that_pauses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_ext.jobs.intake._PAUSE_S", 0.1)
    async with workflow_world(tmp_path, {"a": echoes}) as flows:
        await flows.deploy(ECHO)
        said = await sent(flows, slowly(b"x", asyncio.Event()))
        assert said == (408, "the body did not come within 0.1 s")
