"""Stages that are called for each element of what they get."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.kit.fakes.fake_function import Got, echoes, says
from tests.kit.worlds.workflow_world import says_json, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_stage_is_called_for_each_element_and_answers_in_their_order(tmp_path: Path) -> None:
    stages = """
  first: {function: a}
  every: {function: b, after: first, each: true, retries: 1, backoff_ms: 1}
  last: {function: c, after: every}
"""
    failed = asyncio.Event()

    async def doubles(got: Got, writer: asyncio.StreamWriter) -> None:
        number = json.loads(await got.whole())
        got.headers = [one for one in got.headers if one[0] != "content-length"]
        if number == 0 and not failed.is_set():
            failed.set()
            await says(status=503)(got, writer)
        elif number == 1:
            await says(b"one")(got, writer)
        else:
            await says_json(b'{"n": %d}' % (2 * number), delay_s=0.01 * (20 - number))(got, writer)

    many = json.dumps(list(range(20))).encode()
    functions = {"a": says_json(many), "b": doubles, "c": echoes}
    async with workflow_world(tmp_path, functions) as flows:
        await flows.deploy(stages)
        said = json.loads((await flows.call()).body)

        assert said == [{"n": 0}, "one", *({"n": 2 * number} for number in range(2, 20))]
        assert (await flows.runs())[0]["stages"]["every"]["attempts"] == 21


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"[1, 2]", 200, "[1,2]"),
        (b"[]", 200, "[]"),
        (b'["\\ud800", "\xc3\xa9", 1e3]', 200, r'["\ud800","\u00e9",1000.0]'),
        (b"[1e400]", 400, "the request is not JSON: 1e400 is too large a number"),
        (b"{}", 400, "is no array"),
        (b"x", 400, "the request is not JSON"),
        (b"[" + b"1," * 300 + b"1]", 400, "more than 256 elements"),
        (b"[" + b" " * (1 << 20) + b"]", 413, "the request is larger than 1048576 bytes"),
        (b"[1" + b",1" * 100_000 + b"]", 413, "the request is larger than 100000 elements"),
    ],
)
async def test_last_stage_may_be_called_for_each_element_of_the_request(
    tmp_path: Path, body: bytes, status: int, text: str
) -> None:
    async def same(got: Got, writer: asyncio.StreamWriter) -> None:
        body = await got.whole()
        got.headers = [one for one in got.headers if one[0] != "content-length"]
        await says_json(body)(got, writer)

    async with workflow_world(tmp_path, {"a": same}) as flows:
        await flows.deploy("  only: {function: a, each: true}")
        said = await flows.call(body)

        assert said.status == status
        assert text in (
            json.dumps(said.body, separators=(",", ":")) if status == 200 else said.body
        )
        assert said.headers["x-workflow-stage"] == "only"


async def test_first_failure_of_an_element_ends_the_others(tmp_path: Path) -> None:
    stages = "  every: {function: a, each: true}\n  last: {function: b, after: every}"
    left = asyncio.Event()

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        if await got.whole() == b"1":
            got.headers = []
            await says(b"bad", 422)(got, writer)
            return
        try:
            await got.pause(60)
        except ConnectionResetError:
            left.set()
            raise

    async with workflow_world(tmp_path, {"a": behave, "b": says()}) as flows:
        await flows.deploy(stages)
        said = await flows.call(b"[0, 1]")

        assert (said.status, said.body) == (422, "bad")
        await left.wait()


@pytest.mark.parametrize(
    ("elements", "wishes", "status"),
    [(16, ", by_handle: true", 200), (17, ", by_handle: true", 502), (17, "", 200)],
)
async def test_stage_is_not_begun_that_would_pass_on_too_many_handles(
    tmp_path: Path, elements: int, wishes: str, status: int
) -> None:
    many = iter(range(elements))

    async def by_handle(got: Got, writer: asyncio.StreamWriter) -> None:
        handle = f"x-gpu-data: node-1.{next(many):032x}\r\n" if wishes else ""
        await says(headers=handle)(got, writer)

    async with workflow_world(tmp_path, {"a": by_handle, "b": says()}) as flows:
        last = "  last: {function: b, after: every, by_handle: true}"
        await flows.deploy(f"  every: {{function: a, each: true{wishes}}}\n{last}")
        said = await flows.call(json.dumps(list(range(elements))).encode())

        assert said.status == status
        assert len(flows.got["a"]) == (elements if status == 200 else 0)
