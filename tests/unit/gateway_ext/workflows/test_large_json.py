"""What strangers send as JSON, and the gateway itself reads: once, and no more than a bound."""

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from common.telemetry.traces import TraceContext
from gateway_ext.calls.invoke import Invoke
from gateway_ext.workflows.conditions import Unmeetable, condition
from gateway_ext.workflows.errors import StageFailed
from gateway_ext.workflows.history import RunRecord
from gateway_ext.workflows.limits import RunLimits, RunShare
from gateway_ext.workflows.plan import PlannedStage, read_workflow
from gateway_ext.workflows.runs import LiveRun, RunServices
from gateway_ext.workflows.stage_inputs import StageAnswer, StageInput, workflow_request
from tests.kit.fakes.fake_function import says
from tests.kit.waiting import eventually
from tests.kit.worlds.workflow_world import says_json, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)

COMPARES = "  only: {function: a, when: request.json.x == 1 or request.json.y == 2}"
JOINS = "  first: {function: a}\n  last: {function: b, after: [request, first]}"
EACH = "  only: {function: a, each: true}"
BOMB = b"[" + b"[]," * 100_000 + b"[]]"
TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("stages", [COMPARES, JOINS, EACH])
@pytest.mark.parametrize(
    ("body", "text"),
    [(BOMB, "100000 elements"), (b'"' + b"x" * (1 << 20) + b'"', "1048576 bytes")],
)
async def test_request_is_refused_before_any_stage_when_its_json_is_too_large(
    tmp_path: Path, stages: str, body: bytes, text: str
) -> None:
    async with workflow_world(tmp_path, {"a": says(), "b": says()}) as flows:
        await flows.deploy(stages)
        said = await flows.call(body, headers=JSON)

        assert said.status == 413
        assert f"the request is larger than {text}" in said.body
        assert flows.got == {"a": [], "b": []}


@pytest.mark.parametrize(
    "text",
    ['"éééé"', '"日本\\\\\\"\\n"', '"😀\\ud800\\\\"', '{"é":["\\udc00\\ud800",1,null]}'],
)
def test_elements_are_as_long_as_they_were_when_they_are_not_ascii(text: str) -> None:
    (found,) = StageAnswer(None, f"[{text}]".encode()).elements(1 << 10)
    assert found == text.encode()


def test_text_is_joined_without_escapes() -> None:
    assert StageAnswer(200, "né😀".encode(), b"text/plain").embedded() == '"né😀"'.encode()


async def test_large_request_is_passed_on_when_the_gateway_need_not_read_it(
    tmp_path: Path,
) -> None:
    async with workflow_world(tmp_path, {"a": says()}) as flows:
        await flows.deploy("  only: {function: a}")

        assert (await flows.call(BOMB, headers=JSON)).status == 200
        assert flows.bodies("a") == [BOMB]


async def test_text_is_not_joined_when_it_is_too_large(tmp_path: Path) -> None:
    async with workflow_world(
        tmp_path, {"a": says(), "b": says()}, workflow_json_bytes=100
    ) as flows:
        await flows.deploy(JOINS)
        said = await flows.call(b"\0" * 101, headers={"Content-Type": "text/plain"})

        assert said.status == 413
        assert "to be joined the request is larger than 100 bytes" in said.body


async def test_answer_fails_its_stage_when_its_json_is_too_large(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, {"a": says_json(BOMB), "b": says()}) as flows:
        await flows.deploy(JOINS)
        said = await flows.call()

        assert said.status == 502
        assert said.body == "stage first: as JSON its answer is larger than 100000 elements"


def test_answer_is_decoded_once_however_often_it_is_compared() -> None:
    texts = ["a.json.x == 1", "a.json.y > 1"]
    conditions = [condition(text, ["a"]) for text in texts]
    answer = StageAnswer(200, b'{"x": 1, "y": [[[]]]}', b"application/json")
    answer.read({path for each in conditions for path in each.paths("a")}, 100)
    answer.body = b"what is decoded again fails"

    assert conditions[0].holds({"a": answer})
    with pytest.raises(Unmeetable, match=r"a: \[\] > 1.0"):  # nothing of the array is kept
        conditions[1].holds({"a": answer})


async def test_client_that_leaves_ends_the_wait_for_its_json_to_be_read() -> None:
    plan = read_workflow("workflow: w\nstages:\n" + COMPARES)
    limits = RunLimits(9, 1 << 30, 1 << 30, 1 << 20)
    services = RunServices(cast(Invoke, None), limits)
    request = workflow_request("c", [], b"", b'"' + b"x" * 100_000 + b'"')
    record = RunRecord(plan.id, "c")
    run = LiveRun(services, plan, request, RunShare(limits), record, TRACE)
    async with services.reading:  # as another run does, for as long as it decodes
        answering = asyncio.create_task(run.answer())
        done, _ = await asyncio.wait({answering}, timeout=0)
        assert not done
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
    assert not services.reading.locked()


async def test_bodies_are_read_one_at_a_time_when_clients_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls, services, _ = a_run(COMPARES)
    begun, gate = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        gate.wait(60)
        raise Unmeetable("nobody reads this")

    leaving = asyncio.create_task(calls.computed("only", 1 << 20, read))
    await eventually(begun.is_set, "it is read")
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert services.reading.locked(), "the thread still reads"
    gate.set()
    assert await calls.computed("only", 1 << 20, lambda: "the next") == "the next"
    assert not services.reading.locked()
    gc.collect()
    assert not caplog.records


class AnsweredRun(LiveRun):
    """Calls of stages that are all answered the same."""

    async def called(self, stage: PlannedStage, sent: StageInput, finish: Any) -> Any:
        del stage, sent, finish
        self._share.hold(60)
        return StageAnswer(200, b"x" * 60)


async def test_nothing_is_held_of_answers_to_elements_when_their_array_cannot_be_used() -> None:
    stages = "  e: {function: a, each: true}\n  l: {function: b, after: e, when: e.json.x == 1}"
    calls, _, share = a_run(stages, json_bytes=100)
    each = read_workflow("workflow: w\nstages:\n" + stages).stages["e"]
    with pytest.raises(StageFailed, match="larger than 100 bytes"):
        await calls.called_for_each(each, StageInput([], b"", b"[1, 2]"))
    assert share.held_bytes == 0


def a_run(stages: str, json_bytes: int = 1 << 20) -> tuple[LiveRun, RunServices, RunShare]:
    """One run of a workflow with these stages."""
    plan = read_workflow("workflow: w\nstages:\n" + stages)
    limits = RunLimits(9, 1 << 30, 1 << 30, json_bytes)
    services, share = RunServices(cast(Invoke, None), limits), RunShare(limits)
    request, record = workflow_request("c", [], b"", b""), RunRecord(plan.id, "c")
    return AnsweredRun(services, plan, request, share, record, TRACE), services, share
