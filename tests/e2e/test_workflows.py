"""Workflows on a whole stack: the example of this repository, and data that stays on the GPU."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from gateway_ext.runtime.template.example_calls import examples_in
from tests.kit.places import ROOT
from tests.kit.stacks.handlers import write
from tests.kit.stacks.stack import PATIENCE_S, Rest, Stack

EXAMPLE = ("classify", "generate", "pipeline")

MAKES = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 256).eval().cuda()
def handle(event, context):
    with torch.no_grad():
        return model(torch.ones(3, 64, device="cuda"))
"""

TAKES = """
def handle(event, context):
    return {"shape": list(event.data.shape), "on": str(event.data.device)}
"""

BY_HANDLE = b"""
workflow: by-handle
stages:
  make: {function: makes, by_handle: true}
  take: {function: takes, after: make}
"""


@pytest.fixture
def example(rest: Rest) -> Iterator[None]:
    """The functions of workflow.yml, deployed as stack.yml says."""
    said: dict[str, Any] = yaml.safe_load((ROOT / "stack.yml").read_text())["functions"]
    for name in EXAMPLE:
        process = {"envProcess": "python runtime --gpu", "image": said[name]["image"]}
        rest.deploy(name, annotations=said[name]["annotations"], **process)
    yield
    for name in EXAMPLE:
        rest.remove(name)


@pytest.mark.slow
@pytest.mark.usefixtures("example")
def test_example_workflow_is_deployed_and_streams_its_last_stage(up: Stack, rest: Rest) -> None:
    login = ("--gateway", up.url, "--secrets-dir", str(up.state / "secrets"))
    done = up.run("workflow", "deploy", str(ROOT / "workflow.yml"), *login)
    assert done.returncode == 0, done.stderr
    body = examples_in(ROOT / "functions/classify")[0].body
    headers = {"Content-Type": "application/json", "X-Call-Id": "flow-1"}
    with rest.http.stream(
        "POST", "/workflow/describe-picture", content=body, headers=headers, timeout=PATIENCE_S
    ) as answer:
        assert answer.status_code == httpx.codes.OK, answer.read()
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-workflow-stage"] == "tell"
        events = [line for line in answer.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    done = up.run("workflow", "logs", "describe-picture", "--json", *login)
    (run,) = json.loads(done.stdout)["runs"]
    assert set(run["stages"]) == {"classify", "search", "tell"}
    assert all(stage["status"] == httpx.codes.OK for stage in run["stages"].values())
    secret = ("--secret-file", str(up.state / "secret"))
    done = up.run("trace", "flow-1", "--json", *login, "--scheduler", up.scheduler_url, *secret)
    spans = json.loads(done.stdout)["spans"]
    assert len({span["trace_id"] for span in spans}) == 1
    stages = {span["attributes"].get("gpufaas.stage") for span in spans}
    assert stages >= {"classify", "search", "tell"}


@pytest.mark.slow
def test_result_of_a_stage_stays_on_its_node_and_goes_on_as_a_handle(up: Stack, rest: Rest) -> None:
    process = {"envProcess": "python runtime --gpu"}
    rest.deploy("makes", annotations=write(up.work, "makes", MAKES), **process)
    rest.deploy("takes", annotations=write(up.work, "takes", TAKES), **process)
    answer = rest.http.post("/system/workflows", content=BY_HANDLE, auth=("admin", up.password))
    assert answer.status_code == httpx.codes.ACCEPTED, answer.text
    for _ in range(3):
        answer = rest.http.post("/workflow/by-handle", content=b"", timeout=PATIENCE_S)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.json()["shape"] == [3, 256]
    for name in ("makes", "takes"):
        rest.remove(name)
