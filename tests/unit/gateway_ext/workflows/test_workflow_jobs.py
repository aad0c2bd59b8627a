"""Async workflows: queued as functions' calls are, called back, retried, and given up."""

import asyncio
from pathlib import Path

import pytest

from tests.kit.fakes.fake_function import Got, a_function, says
from tests.kit.waiting import eventually
from tests.kit.worlds.workflow_world import WorkflowWorld, says_json, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)

CHAIN = "  first: {function: a}\n  second: {function: b, after: first}\n"


async def jobs_left(flows: WorkflowWorld) -> int:
    found = (await flows.world.get("/system/jobs")).body
    return int(found["calls"] + found["callbacks"] + found["running"])


async def test_async_workflow_is_run_and_called_back(tmp_path: Path) -> None:
    functions = {"a": says(b"one"), "b": says_json(b"[2]")}
    async with (
        a_function(says(), tcp=True) as receiver,
        workflow_world(tmp_path, functions, callback_allowed=("127.0.0.0/8",)) as flows,
    ):
        await flows.deploy(CHAIN)
        url = receiver.endpoint.address.replace("tcp:", "http://")
        headers = {"X-Call-Id": "mine", "X-Callback-Url": url, "X-Gpu-Data": "handle"}
        said = await flows.call(b"in", "/async-workflow/w?q=1", headers=headers)

        assert (said.status, said.headers["x-call-id"]) == (202, "mine")
        await eventually(lambda: bool(receiver.got), "the callback came")
        (got,) = receiver.got
        assert (got.body, got.header("x-call-id")) == (b"[2]", "mine")
        assert got.header("x-function-status") == "200"
        (first,), (second,) = flows.got["a"], flows.got["b"]
        assert (first.body, first.target) == (b"in", "/?q=1")
        assert (second.body, second.header("x-gpu-data")) == (b"one", "handle")
        await eventually(lambda: no_jobs(flows), "nothing is left")


async def no_jobs(flows: WorkflowWorld) -> bool:
    return await jobs_left(flows) == 0


async def test_same_call_is_queued_once(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def held(got: Got, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await says()(got, writer)

    async with workflow_world(tmp_path, {"a": held, "b": says()}) as flows:
        await flows.deploy(CHAIN)
        for _ in range(3):
            said = await flows.call(path="/async-workflow/w", headers={"X-Call-Id": "mine"})
            assert said.status == 202
        go.set()
        await eventually(lambda: no_jobs(flows), "nothing is left")
        assert len(flows.got["a"]) == 1


@pytest.mark.parametrize("status", [503, 429])
async def test_failed_workflow_is_run_again_and_then_dead(tmp_path: Path, status: int) -> None:
    async with workflow_world(
        tmp_path, {"a": says(), "b": says(b"no", status)}, async_attempts=2
    ) as flows:
        await flows.deploy(CHAIN)
        await flows.call(path="/async-workflow/w", headers={"X-Call-Id": "mine"})
        await eventually(lambda: no_jobs(flows), "it is given up")
        (letter,) = (await flows.world.get("/system/jobs/dead")).body
        assert (letter["callId"], letter["function"]) == ("mine", "workflow:w.openfaas-fn")
        assert letter["lastStatus"] == status
        assert len(flows.got["b"]) == 2


async def test_workflow_whose_first_function_puts_it_off_has_used_no_attempt(
    tmp_path: Path,
) -> None:
    async with workflow_world(
        tmp_path, {"a": says(b"later", 429), "b": says()}, async_attempts=1
    ) as flows:
        await flows.deploy(CHAIN)
        await flows.call(path="/async-workflow/w")
        await eventually(lambda: len(flows.got["a"]) > 1, "it is called again")
        assert (await flows.world.get("/system/jobs/dead")).body == []


async def test_failure_that_no_repetition_cures_is_the_result(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, {"a": says(status=400), "b": says()}) as flows:
        await flows.deploy(CHAIN)
        await flows.call(path="/async-workflow/w")
        await eventually(lambda: no_jobs(flows), "it is done")
        assert len(flows.got["a"]) == 1
        assert (await flows.runs())[0]["status"] == 400


@pytest.mark.parametrize(("body", "path", "status"), [
    (b"x" * 2000, "/async-workflow/w", 413),
    (b"", "/async-workflow/gone", 404),
    (b"", "/async-workflow/", 400),
])  # fmt: skip
async def test_what_cannot_be_queued_is_refused(
    tmp_path: Path, body: bytes, path: str, status: int
) -> None:
    functions = {"a": says(), "b": says()}
    async with workflow_world(tmp_path, functions, workflow_answer_bytes=1000) as flows:
        await flows.deploy(CHAIN)
        assert (await flows.call(body, path)).status == status


async def test_workflow_that_was_removed_is_waited_for(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, {"a": says(), "b": says(status=503)}) as flows:
        await flows.deploy(CHAIN)
        await flows.call(path="/async-workflow/w")
        await eventually(lambda: bool(flows.got["b"]), "it ran once")
        await flows.world.ask("DELETE", "/system/workflows", {"workflowName": "w"})
        await flows.deploy("  only: {function: a}")
        await eventually(lambda: no_jobs(flows), "it ran again, as it is now")
