"""Stages whose calls are refused for now, as by a quota, or whose answers find no room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.calls.invoke import Invoke, StreamedResponse
from gateway_ext.errors import Busy
from gateway_ext.model import FunctionId
from gateway_ext.workflows.errors import StageFailed
from gateway_ext.workflows.runs import TEXT_HEADER, failed_answer
from tests.kit.fakes.fake_function import Got, says
from tests.kit.waiting import eventually
from tests.kit.worlds.workflow_world import WorkflowWorld, says_json, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)

CHAIN = """
  first: {function: a}
  second: {function: b, after: first}
"""
SMALL: dict[str, Any] = {"workflow_answer_bytes": 1000, "workflow_held_bytes": 1500}
HELD_BYTES = "gpufaas_gateway_workflow_bytes"


@pytest.mark.parametrize("refused", ["/function/a", "/function/b"])
async def test_stage_that_is_refused_is_called_again_if_something_was_computed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    direct, refusals = Invoke.direct, [Busy(FunctionId("openfaas-fn", "x"), 0.2)]

    async def refuses_once(self: Invoke, method: str, path: bytes, *rest: Any) -> StreamedResponse:
        if path.startswith(refused.encode()) and refusals:
            raise refusals.pop()
        return await direct(self, method, path, *rest)

    monkeypatch.setattr(Invoke, "direct", refuses_once)
    async with workflow_world(tmp_path, {"a": says(b"1"), "b": says(b"2")}) as flows:
        await flows.deploy(CHAIN)
        said = await flows.call()
        if refused == "/function/a":
            assert (said.status, flows.got["a"], flows.got["b"]) == (429, [], [])
        else:
            assert (said.status, said.body, len(flows.got["a"])) == (200, "2", 1)
            assert (await flows.runs())[0]["stages"]["second"]["attempts"] == 2


def test_answer_says_whether_the_stage_was_refused() -> None:
    for refused in (False, True):
        failure = StageFailed("first", 429, "busy", headers=[TEXT_HEADER], refused=refused)
        answer = failed_answer(failure)
        assert (answer.status, answer.refused) == (429, refused)


@asynccontextmanager
async def full_world(folder: Path, second: bytes, **more: Any) -> AsyncIterator[WorkflowWorld]:
    """A gateway of whose 1,500 bytes for workflows another run holds 900 until the end."""
    let_go = asyncio.Event()

    async def holds(got: Got, writer: asyncio.StreamWriter) -> None:
        await let_go.wait()
        await says()(got, writer)

    functions = {"a": says(b"1"), "b": says(second), "c": says(), "holds": holds}
    async with workflow_world(folder, functions, **SMALL, **more) as flows:
        await flows.deploy("  only: {function: holds}", "workflow: other")
        other = asyncio.create_task(flows.call(b"x" * 900, "/workflow/other"))
        await eventually(lambda: bool(flows.got["holds"]))
        try:
            yield flows
        finally:
            let_go.set()
            await other


@pytest.mark.parametrize(("wishes", "calls"), [("", 1), (", retries: 1, backoff_ms: 1", 2)])
async def test_function_is_not_called_again_when_its_answer_finds_no_room(
    tmp_path: Path, wishes: str, calls: int
) -> None:
    async with full_world(tmp_path, second=b"x" * 700) as flows:
        chain = f"  first: {{function: a}}\n  second: {{function: b, after: first{wishes}}}\n"
        await flows.deploy(chain + "  third: {function: c, after: second}", "workflow: w")
        said = await flows.call()

        assert (said.status, "retry-after" in said.headers) == (429, True)
        assert said.headers["x-workflow-stage"] == "second"
        assert (len(flows.got["b"]), len(flows.got["c"])) == (calls, 0)


async def test_async_run_whose_answer_finds_no_room_has_used_an_attempt(tmp_path: Path) -> None:
    async with full_world(tmp_path, second=b"x" * 700, async_attempts=2) as flows:
        chain = "  first: {function: a}\n  second: {function: b, after: first}\n"
        await flows.deploy(chain + "  third: {function: c, after: second}", "workflow: w")
        await flows.call(path="/async-workflow/w")

        async def is_dead() -> bool:
            return bool((await flows.world.get("/system/jobs/dead")).body)

        await eventually(is_dead, "it is given up")
        assert len(flows.got["b"]) == 2


async def test_answers_that_nobody_uses_are_given_back(tmp_path: Path) -> None:
    stages = """
  first: {function: a, retries: 3, backoff_ms: 1}
  every: {function: b, after: first, each: true}
  third: {function: c, after: every, retries: 3, backoff_ms: 1, optional: true}
  last: {function: d, after: third}
"""
    failures = [says(b"x" * 600, 503)] * 3
    no_json = [says_json(b"x" * 600)] * 4

    async def fails_first(got: Got, writer: asyncio.StreamWriter) -> None:
        await (failures.pop() if failures else says_json(b"[1, 2]"))(got, writer)

    async def says_no_json(got: Got, writer: asyncio.StreamWriter) -> None:
        await no_json.pop()(got, writer)

    big = says(b"y" * 300)
    functions = {"a": fails_first, "b": big, "c": says_no_json, "d": says(b"fine")}
    async with workflow_world(tmp_path, functions, **SMALL) as flows:
        await flows.deploy(stages.replace("after: third}", "after: [request, third]}"))
        said = await flows.call()

        assert (said.status, said.body) == (200, "fine")
        assert (failures, no_json) == ([], [])
        assert f"{HELD_BYTES} 0.0" in (await flows.world.get("/metrics")).body


async def test_run_that_can_never_find_room_is_not_repeated(tmp_path: Path) -> None:
    stages = CHAIN.replace("after: first", "after: first, retries: 3, backoff_ms: 1")
    functions = {"a": says(b"x" * 900), "b": says(b"x" * 900), "c": says()}
    async with workflow_world(tmp_path, functions, **SMALL) as flows:
        await flows.deploy(stages + "  third: {function: c, after: second}")
        said = await flows.call()

        assert (said.status, "retry-after" in said.headers) == (413, False)
        assert said.body == "stage second: what the workflow holds would be larger than 1500 bytes"
        assert len(flows.got["b"]) == 1


async def test_stage_is_not_tried_again_when_its_function_asks_for_a_later_time(
    tmp_path: Path,
) -> None:
    later = "Retry-After: Fri, 01 Jan 2100 00:00:00 GMT\r\n"
    async with workflow_world(tmp_path, {"a": says(b"later", 503, later)}) as flows:
        stage = "  only: {function: a, retries: 3, backoff_ms: 1}"
        await flows.deploy(stage, "workflow: w\ntimeout_ms: 20000")
        assert (await flows.call()).status == 503
        assert len(flows.got["a"]) == 1
