"""Stages whose calls are refused for now, as by a quota, before and after others were computed."""

from pathlib import Path
from typing import Any

import pytest

from gateway_ext.calls.invoke import Invoke, StreamedResponse
from gateway_ext.errors import Busy, StageFailed
from gateway_ext.model import FunctionId
from gateway_ext.workflows.run.workflow_answers import TEXT, failed_answer
from tests.kit.fakes.fake_function import says
from tests.kit.worlds.workflow_world import workflow_world

CHAIN = """
  first: {function: a}
  second: {function: b, after: first}
"""


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
        failure = StageFailed("first", 429, "busy", headers=[TEXT], refused=refused)
        answer = failed_answer(failure)
        assert (answer.status, answer.refused) == (429, refused)
