"""Runs of workflows: chains, branches, joins, conditions, retries, and what is passed on."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from gateway_ext.calls.passed_headers import SANDBOX
from tests.kit.fakes.fake_function import Behaviour, Got, echoes, says, writes
from tests.kit.waiting import eventually
from tests.kit.worlds.workflow_world import WorkflowWorld, says_json, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)

HANDLE = "node-1." + "a" * 32
CHAIN = """
  first: {function: a}
  second: {function: b, after: first}
"""
BRANCHES = """
  first: {function: a}
  left: {function: b, after: first}
  right: {function: c, after: first}
  last: {function: d, after: [left, right]}
"""


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Behaves so, one after the other; the last one stays."""
    left = list(behaviours)

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(got, writer)

    return behave


async def test_chain_passes_each_answer_on(tmp_path: Path) -> None:
    functions = {"a": says_json(b'{"x": 1}'), "b": says(b"done", 201, "x-own: 7\r\n")}
    async with workflow_world(tmp_path, functions) as flows:
        assert (await flows.deploy(CHAIN)).status == 202
        said = await flows.call(b"hi", "/workflow/w?q=1", headers={"X-Call-Id": "mine", "X-Y": "z"})

        assert (said.status, said.body) == (201, "done")
        assert said.headers["x-call-id"] == "mine"
        assert said.headers["x-workflow-stage"] == "second"
        assert said.headers["x-own"] == "7"
        assert [name.lower() for name in said.headers].count("x-duration-seconds") == 1
        assert int(said.headers["x-start-time"]) > 0
        for name, value in SANDBOX:
            assert said.headers[name.decode()] == value.decode()
        (first,), (second,) = flows.got["a"], flows.got["b"]
        assert (first.body, first.target, first.header("x-y")) == (b"hi", "/?q=1", "z")
        assert (second.body, second.target, second.header("x-y")) == (b'{"x": 1}', "/", None)
        assert second.header("content-type") == "application/json"
        assert {one.header("x-call-id") for one in (first, second)} == {"mine"}
        assert second.header("x-forwarded-for") == "127.0.0.1"


async def test_branches_run_at_the_same_time_and_are_joined(tmp_path: Path) -> None:
    both = asyncio.Barrier(2)

    def meets(body: bytes, headers: str = "") -> Behaviour:
        async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
            await both.wait()
            await says(body, headers=headers)(got, writer)

        return behave

    functions = {
        "a": says(b"text"),
        "b": meets(b'{"x": [1]}', "content-type: application/problem+json; charset=utf-8\r\n"),
        "c": meets("é".encode()),
        "d": echoes,
    }
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(BRANCHES)
        said = await flows.call()

        assert json.loads(said.body) == {"left": {"x": [1]}, "right": "é"}
        assert flows.bodies("b") == flows.bodies("c") == [b"text"]


async def test_answers_of_several_last_stages_are_joined(tmp_path: Path) -> None:
    stages = """
  first: {function: a}
  left: {function: b, after: first}
  right: {function: a, after: [request, first]}
  never: {function: b, after: first, when: status == 500}
"""
    functions = {"a": says_json(b"1"), "b": says_json(b"[2]")}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(stages)
        said = await flows.call(b"hello", headers={"Content-Type": "text/plain"})

        assert (said.status, said.body["left"], said.body["right"]) == (200, [2], 1)
        assert set(said.body) == {"left", "right"}
        assert json.loads(flows.bodies("a")[1]) == {"request": "hello", "first": 1}


@pytest.mark.parametrize(
    ("label", "expected"), [("cat", {"cat": "miaow"}), ("dog", {"dog": "wow"})]
)
async def test_condition_chooses_the_branch(
    tmp_path: Path, label: str, expected: dict[str, str]
) -> None:
    stages = """
  first: {function: a}
  cat: {function: b, after: first, when: 'status == 200 and json.label == "cat"'}
  dog: {function: c, after: first, when: 'first.json.label != "cat"'}
  last: {function: d, after: [cat, dog]}
"""
    answer = json.dumps({"label": label}).encode()
    functions = {"a": says_json(answer), "b": says(b"miaow"), "c": says(b"wow"), "d": echoes}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(stages)
        said = await flows.call()

        assert json.loads(said.body) == expected
        (run,) = await flows.runs()
        assert [name for name, one in run["stages"].items() if one["skipped"]] == [
            *{"cat", "dog"} - set(expected)
        ]


async def test_workflow_whose_last_stage_is_skipped_has_no_content(tmp_path: Path) -> None:
    stages = """
  first: {function: a}
  second: {function: b, after: first, when: json.go == true}
  third: {function: b, after: second}
"""
    async with workflow_world(tmp_path, {"a": says_json(b"{}"), "b": says()}) as flows:
        await flows.deploy(stages)
        said = await flows.call()

        assert (said.status, said.body) == (204, "")
        assert flows.got["b"] == []


async def test_failed_stage_is_the_answer_and_ends_the_others(tmp_path: Path) -> None:
    slow_left = asyncio.Event()

    async def never(got: Got, writer: asyncio.StreamWriter) -> None:
        del writer
        await got.whole()
        try:
            await got.pause(60)
        except ConnectionResetError:
            slow_left.set()
            raise

    functions = {"a": says(), "b": never, "c": says_json(b'{"e": 1}', 422), "d": says()}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(BRANCHES)
        said = await flows.call()

        assert (said.status, said.body) == (422, {"e": 1})
        assert said.headers["x-workflow-stage"] == "right"
        await slow_left.wait()
        assert flows.got["d"] == []
        (run,) = await flows.runs()
        assert (run["status"], run["running"]) == (422, False)
        assert run["stages"]["right"]["why"] == "stage right: c.openfaas-fn answered 422"


async def test_failure_ends_stages_that_countless_paths_lead_to(tmp_path: Path) -> None:
    """Each stage waits for a whole layer: there are 4 ** 15 paths to the last one."""
    stages = [f"  s0-{at}: {{function: {'ab'[at == 0]}}}" for at in range(4)]
    for layer in range(1, 16):
        before = ", ".join(f"s{layer - 1}-{at}" for at in range(4))
        stages += [f"  s{layer}-{at}: {{function: a, after: [{before}]}}" for at in range(4)]
    functions = {"a": says(delay_s=30), "b": says(b"no", 422)}
    async with workflow_world(tmp_path, functions) as flows:
        assert (await flows.deploy("\n".join(stages))).status == 202

        assert (await flows.call()).status == 422


async def test_failed_call_is_made_again_as_often_as_the_file_says(tmp_path: Path) -> None:
    stages = (
        "  first: {function: a, retries: 2, backoff_ms: 1}\n  last: {function: b, after: first}"
    )
    broken = writes(b"HT", close=True)
    functions = {"a": in_turn(says(status=500), broken, says(b"at last")), "b": echoes}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(stages)
        said = await flows.call()

        assert (said.status, said.body) == (200, "at last")
        assert (await flows.runs())[0]["stages"]["first"]["attempts"] == 3


async def test_last_stage_is_repeated_too_and_its_last_failure_is_the_answer(
    tmp_path: Path,
) -> None:
    stages = "  only: {function: a, retries: 1, backoff_ms: 1}"
    functions = {"a": in_turn(says(b"one", 503), says(b"two", 500))}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(stages)
        said = await flows.call()

        assert (said.status, said.body, len(flows.got["a"])) == (500, "two", 2)


@pytest.mark.parametrize("status", [400, 404])
async def test_what_cannot_pass_is_not_repeated(tmp_path: Path, status: int) -> None:
    stages = (
        "  first: {function: a, retries: 3, backoff_ms: 1}\n  last: {function: b, after: first}"
    )
    async with workflow_world(tmp_path, {"a": says(status=status), "b": says()}) as flows:
        await flows.deploy(stages)

        assert (await flows.call()).status == status
        assert len(flows.got["a"]) == 1


async def test_failure_of_an_optional_stage_is_an_answer(tmp_path: Path) -> None:
    stages = """
  first: {function: a, optional: true}
  good: {function: b, after: first, when: status < 400}
  bad: {function: c, after: first, when: status >= 400}
"""
    functions = {"a": says(b"no", 500), "b": says(), "c": echoes}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(stages)

        assert (await flows.call()).body == {"bad": "no"}


async def test_stage_beyond_its_time_fails(tmp_path: Path) -> None:
    stages = "  first: {function: a, timeout_ms: 50}\n  last: {function: b, after: first}"
    async with workflow_world(tmp_path, {"a": says(delay_s=30), "b": says()}) as flows:
        await flows.deploy(stages)
        said = await flows.call()

        assert said.status == 504
        assert said.body.startswith(
            "stage first: a.openfaas-fn did not answer within 0.05 s; its log: faas-cli logs a,"
        )


async def test_answer_that_stalls_beyond_the_stages_time_fails_it(tmp_path: Path) -> None:
    stages = "  first: {function: a, timeout_ms: 50}\n  last: {function: b, after: first}"
    stalls = writes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", 30.0)
    async with workflow_world(tmp_path, {"a": stalls, "b": says()}) as flows:
        await flows.deploy(stages)
        said = await flows.call()

        assert said.status == 504
        assert said.body.startswith(
            "stage first: a.openfaas-fn did not answer within 0.05 s; its log: faas-cli logs a,"
        )


async def test_workflow_beyond_its_time_fails_wherever_it_is(tmp_path: Path) -> None:
    functions = {"a": says(status=503), "b": says(delay_s=30)}
    async with workflow_world(tmp_path, functions) as flows:
        stages = "  first: {function: b}\n  last: {function: a, after: first}"
        await flows.deploy(stages, "workflow: w\ntimeout_ms: 100")
        assert (await flows.call()).status == 504

        stages = "  only: {function: a, retries: 9, backoff_ms: 60000}"
        await flows.deploy(stages, "workflow: w\ntimeout_ms: 20000")
        assert (await flows.call()).status == 503, "no time is left for another attempt"


async def test_no_stage_is_called_without_time(tmp_path: Path) -> None:
    functions = {"a": says(delay_s=0.2), "b": says()}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(CHAIN, "workflow: w\ntimeout_ms: 150")
        said = await flows.call()

        assert said.status == 504
        assert flows.got["b"] == []


@pytest.mark.parametrize(
    ("garbage", "text"),
    [
        (says_json(b"{"), "stage left: its answer is not JSON"),
        (says_json(b"NaN"), "stage left: its answer is not JSON"),
        (says_json(b"[" * 100_000), "stage left: its answer is not JSON"),
        (says_json(b'"\xff"'), "stage left: its answer is not JSON"),
        (says(b"\xff"), "neither JSON nor text"),
        (says(b"x" * 2000), "its answer is larger than 1000 bytes"),
        (says(headers="x-gpu-data: nonsense\r\n"), "its X-Gpu-Data is no handle"),
        (says(headers="content-encoding: gzip\r\n"), "its answer is encoded: gzip"),
        (writes(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", close=True), "broke off"),
        (writes(b"garbage\r\n\r\n"), "broke off"),
    ],
)  # fmt: skip
async def test_garbage_fails_the_stage_and_names_it(
    tmp_path: Path, garbage: Behaviour, text: str
) -> None:
    functions = {"a": says(), "b": garbage, "c": says(), "d": says()}
    answer_bytes = 1 << 20 if "JSON" in text else 1000
    async with workflow_world(tmp_path, functions, workflow_answer_bytes=answer_bytes) as flows:
        await flows.deploy(BRANCHES)
        said = await flows.call()

        assert said.status == 502
        assert text in said.body
        assert flows.got["d"] == []


async def test_condition_on_what_is_not_json_fails(tmp_path: Path) -> None:
    stages = "  first: {function: a}\n  last: {function: b, after: first, when: json.x == 1}"
    async with workflow_world(tmp_path, {"a": says(b"text"), "b": says()}) as flows:
        await flows.deploy(stages)
        said = await flows.call()

        assert said.status == 502
        assert said.body.startswith("stage last: its answer is not JSON")


async def test_handles_of_data_are_passed_on(tmp_path: Path) -> None:
    stages = """
  first: {function: a, by_handle: true}
  second: {function: b, after: first}
  third: {function: c, after: [first, second, request]}
"""
    kept = says_json(b'{"data": "h"}', headers=f"x-gpu-data: {HANDLE}\r\n")
    functions = {"a": kept, "b": says(b"x"), "c": says(b"y", headers=f"x-gpu-data: {HANDLE}\r\n")}
    mine = "node-2." + "b" * 32
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(stages)
        said = await flows.call(headers={"X-Gpu-Data": f"{mine}, handle"})

        assert said.headers["x-gpu-data"] == HANDLE
        data = {name: flows.got[name][0].header("x-gpu-data") for name in functions}
        assert data == {
            "a": f"{mine}, handle",
            "b": HANDLE,
            "c": f"{HANDLE}, {mine}, handle",
        }


async def test_last_answer_is_streamed(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def streams(got: Got, writer: asyncio.StreamWriter) -> None:
        await got.whole()
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await more.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    async with workflow_world(tmp_path, {"a": says(), "b": streams}) as flows:
        await flows.deploy(CHAIN)
        world = flows.world
        async with world.session.post(f"{world.gateway.url}/workflow/w", data=b"") as answer:
            assert await answer.content.readexactly(1) == b"a"
            more.set()
            assert await answer.read() == b"b"


async def test_answer_that_breaks_off_is_cut_for_the_client(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab"
    functions = {"a": says(), "b": writes(head, 0.05, close=True)}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(CHAIN)
        with pytest.raises(aiohttp.ClientPayloadError):
            await flows.call()
        await eventually_ended(flows, 502)


async def test_stage_whose_answer_breaks_off_says_so_and_not_why_it_was_repeated(
    tmp_path: Path,
) -> None:
    stages = "  only: {function: a, retries: 1, backoff_ms: 1}"
    broken = writes(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", 0.05, close=True)
    async with workflow_world(tmp_path, {"a": in_turn(says(status=503), broken)}) as flows:
        await flows.deploy(stages)
        with pytest.raises(aiohttp.ClientPayloadError):
            await flows.call()
        await eventually_ended(flows, 502)
        (run,) = await flows.runs()

        assert run["stages"]["only"]["why"] == run["why"] != ""


@pytest.mark.parametrize("slow", ["a", "b"])
async def test_client_that_leaves_ends_the_calls(tmp_path: Path, slow: str) -> None:
    left = asyncio.Event()

    async def waits(got: Got, writer: asyncio.StreamWriter) -> None:
        await got.whole()
        if slow == "b":  # in the middle of the answer
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        try:
            await got.pause(60)
        except ConnectionResetError:
            left.set()
            raise

    functions = {"a": says(), "b": says()} | {slow: waits}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(CHAIN)
        calling = asyncio.create_task(flows.call())
        await eventually(lambda: bool(flows.got[slow]), "the stage is called")
        calling.cancel()
        await left.wait()
        await eventually_ended(flows, 499)


async def eventually_ended(flows: WorkflowWorld, status: int) -> None:
    """Wait until the only run has ended so."""

    async def ended() -> bool:
        (run,) = await flows.runs()
        return not run["running"] and run["status"] == status

    await eventually(ended, f"the run ended with {status}")
