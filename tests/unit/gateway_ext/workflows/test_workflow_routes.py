"""Workflows are deployed, listed, described and removed; they are kept; who may do what."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.errors import QueueAway
from gateway_ext.model import FunctionId
from gateway_ext.workflows.parts import LEAST_CALLS, fastest_s, least_times
from gateway_ext.workflows.plan import WorkflowId, read_workflow
from gateway_ext.workflows.table import Workflows
from tests.kit.fakes.fake_function import Got, says
from tests.kit.waiting import eventually
from tests.kit.worlds.gateway_world import NOBODY
from tests.kit.worlds.workflow_world import WorkflowWorld, says_json, workflow_world

pytestmark = pytest.mark.timeout(180, func_only=True)

CHAIN = "  first: {function: a}\n  second: {function: b, after: first, when: status == 200}\n"
FUNCTIONS = {"a": says_json(b"{}"), "b": says()}


async def test_workflow_is_listed_described_and_removed(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        world = flows.world
        assert (await world.get("/system/workflows")).body == []
        assert (await flows.deploy(CHAIN, "workflow: w\nslo_ms: 500")).status == 202
        assert (await world.get("/system/workflows")).body == [
            {"name": "w", "namespace": "openfaas-fn", "stages": 2, "sloMs": 500.0}
        ]
        await flows.call()
        shown = (await world.get("/system/workflow/w")).body
        assert (shown["name"], shown["timeoutMs"]) == ("w", 300_000.0)
        assert shown["text"].startswith("workflow: w")
        first, second = shown["stages"]
        assert (first["name"], first["after"], second["after"]) == ("first", ["request"], ["first"])
        assert second["when"] == "status == 200"
        assert first["share"] + second["share"] == pytest.approx(1, abs=1e-3)
        (run,) = (await world.get("/system/workflow/w/runs")).body["runs"]
        assert (run["status"], run["slo"]) == (200, "met")

        said = await world.ask("DELETE", "/system/workflows", {"workflowName": "w"})
        assert said.status == 202
        assert (await world.get("/system/workflows")).body == []
        said = await flows.call()
        assert (said.status, said.body) == (404, "workflow w is not deployed in openfaas-fn")
        for method, path, body in (
            ("GET", "/system/workflow/w", None),
            ("GET", "/system/workflow/w/runs", None),
            ("DELETE", "/system/workflows", {"workflowName": "w"}),
        ):
            assert (await world.ask(method, path, body)).status == 404


async def test_workflow_is_replaced_by_post_and_updated_by_put(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        assert (await flows.deploy(CHAIN, method="PUT")).status == 404
        assert (await flows.deploy(CHAIN)).status == 202
        assert (await flows.deploy("  only: {function: b}")).status == 202
        assert (await flows.call()).body == "ok"
        assert (await flows.deploy("  only: {function: a}", method="PUT")).status == 202
        assert (await flows.call()).body == {}


async def test_bad_file_is_refused_with_its_lines_and_changes_nothing(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        await flows.deploy("  only: {function: a}")
        said = await flows.deploy("  x: {function: gone, retries: -1}\n  y: {after: z}")

        assert said.status == 400
        assert said.body.splitlines() == [
            "line 3: x: retries must be a whole number >= 0",
            "line 4: y: after names the unknown stage z",
            "line 4: y: function: the function's name is missing",
        ]
        for bad in (b"\xff", b"", b"x" * (5 << 20)):
            said = await flows.world.ask("POST", "/system/workflows", bad)
            assert said.status in {400, 413}
        assert (await flows.call()).body == {}


async def test_workflows_are_kept_and_those_of_another_namespace_are_apart(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        await flows.deploy(CHAIN)
        said = await flows.deploy("  only: {function: a}", "workflow: w\nnamespace: other")
        assert said.body == "line 4: only: function: function a is not deployed in other"
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        assert (await flows.call(path="/workflow/w.openfaas-fn")).status == 200
        assert (await flows.call(path="/workflow/w.other")).status == 404
        assert (await flows.world.get("/system/workflows?namespace=other")).body == []
        await flows.world.ask("DELETE", "/system/workflows", {"workflowName": "w"})
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        assert (await flows.world.get("/system/workflows")).body == []


async def test_workflows_go_with_their_namespace(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        world = flows.world
        await world.ask("POST", "/system/namespace/other", {"name": "other"})
        await world.deploy("a", namespace="other")
        head = "workflow: w\nnamespace: other"
        assert (await flows.deploy("  only: {function: a}", head)).status == 202
        await flows.deploy(CHAIN)
        await world.ask("DELETE", "/system/namespace/other", {"name": "other"})
        assert (await flows.call(path="/workflow/w.other")).status == 404
        assert (await flows.call()).status == 200


async def test_removal_of_a_namespace_that_failed_in_between_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise QueueAway("it restarts")

    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        world = flows.world
        await world.ask("POST", "/system/namespace/other", {"name": "other"})
        await world.deploy("a", namespace="other")
        await flows.deploy("  only: {function: a}", "workflow: w\nnamespace: other")
        with monkeypatch.context() as patch:
            patch.setattr(Workflows, "remove", away)
            said = await world.ask("DELETE", "/system/namespace/other", {"name": "other"})
            assert said.status == 503
        said = await world.ask("DELETE", "/system/namespace/other", {"name": "other"})
        assert said.status == 404
        assert (await world.get("/system/workflows?namespace=other")).body == []


async def test_namespace_is_removed_while_its_workflows_are_removed_too(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        world = flows.world
        await world.ask("POST", "/system/namespace/other", {"name": "other"})
        await world.deploy("a", namespace="other")
        names = [f"w{number}" for number in range(20)]
        for name in names:
            said = await flows.deploy(
                "  only: {function: a}", f"workflow: {name}\nnamespace: other"
            )
            assert said.status == 202
        removals = [
            world.ask("DELETE", "/system/workflows", {"workflowName": name, "namespace": "other"})
            for name in reversed(names)
        ]
        namespace = world.ask("DELETE", "/system/namespace/other", {"name": "other"})
        said, *others = await asyncio.gather(namespace, *removals)
        assert said.status == 202
        assert {one.status for one in others} <= {202, 404}, "whoever comes later finds none"
        assert (await world.get("/system/workflows?namespace=other")).body == []


async def test_gateway_starts_without_the_stored_workflows_that_its_rules_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = tmp_path / "workflows"
    stored.mkdir()
    (stored / "w.openfaas-fn.yml").write_text("workflow: w")
    (stored / "binary.openfaas-fn.yml").write_bytes(b"\xff")
    (stored / "good.openfaas-fn.yml").write_text("workflow: good\nstages: {a: {function: a}}")
    (stored / ".w.openfaas-fn.yml.1234").write_text("half")
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        listed = (await flows.world.get("/system/workflows")).body
        assert [workflow["name"] for workflow in listed] == ["good"]
        assert "the workflow w.openfaas-fn is left out: line 1: " in caplog.text
        assert f"({stored / 'w.openfaas-fn.yml'})" in caplog.text
        assert "the workflow binary.openfaas-fn is left out: " in caplog.text
        assert len(list(stored.iterdir())) == 3, "refused files stay in the store"
        removed = {"workflowName": "binary"}
        assert (await flows.world.ask("DELETE", "/system/workflows", removed)).status == 202
        assert (await flows.deploy(CHAIN, method="PUT")).status == 202
        assert (await flows.call()).status == 200
    assert not (stored / "binary.openfaas-fn.yml").exists()


async def test_refused_workflow_is_named_until_it_is_mended(tmp_path: Path) -> None:
    (tmp_path / "w.openfaas-fn.yml").write_text("workflow: w")
    workflows = Workflows(tmp_path)
    workflows.open()
    (why,) = workflows.refused.values()
    assert "stages" in why
    await workflows.follow(WorkflowId("openfaas-fn", "w"), None)
    assert (workflows.refused, list(tmp_path.iterdir())) == ({}, [])


async def test_administration_needs_the_password_and_calls_do_not(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        await flows.deploy(CHAIN)
        for method, path in (
            ("GET", "/system/workflows"),
            ("POST", "/system/workflows"),
            ("PUT", "/system/workflows"),
            ("DELETE", "/system/workflows"),
            ("GET", "/system/workflow/w"),
            ("GET", "/system/workflow/w/runs"),
        ):
            assert (await flows.world.ask(method, path, b"", who=NOBODY)).status == 401
        assert (await flows.call()).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/workflow/w", 405),
        ("POST", "/workflow/", 400),
        ("POST", "/workflow", 404),
        ("POST", "/workflow/gone", 404),
        ("POST", "/workflow/w/below", 404),
        ("GET", "/async-workflow/w", 405),
        ("POST", "/async-workflow/gone", 404),
        ("POST", "/async-function/workflow:w", 404),
        ("POST", "/function/workflow:w", 404),
        ("PATCH", "/system/workflows", 405),
        ("GET", "/system/workflow/a%20b", 400),
    ],
)
async def test_what_is_no_call_is_refused(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        await flows.deploy(CHAIN)
        assert (await flows.world.ask(method, path, b"")).status == status


async def test_own_password_reaches_no_stage(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        await flows.deploy(CHAIN)
        assert (await flows.world.ask("POST", "/workflow/w", b"")).status == 200
        assert flows.got["a"][0].header("authorization") is None


async def test_function_that_was_removed_fails_the_stage(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        await flows.deploy(CHAIN)
        await flows.world.ask("DELETE", "/system/functions", {"functionName": "b"})
        said = await flows.call()
        assert said.status == 404
        assert said.body == "stage second: function b is not deployed in openfaas-fn"


async def test_bounds_of_bodies_runs_and_data_are_kept(tmp_path: Path) -> None:
    small: dict[str, Any] = {"workflow_answer_bytes": 1000, "workflow_held_bytes": 1500}
    async with workflow_world(tmp_path, {"a": says(b"x" * 900), "b": says()}, **small) as flows:
        await flows.deploy(CHAIN)
        assert (await flows.call(b"x" * 1001)).status == 413
        assert (await flows.call(b"x" * 500)).status == 200
        said = await flows.call(b"x" * 900)
        assert (said.status, "retry-after" in said.headers) == (413, False)
        assert (await flows.call(b"x" * 500)).status == 200, "what it held was given back"
    joins = CHAIN + "  third: {function: b, after: [first, second]}\n"
    async with workflow_world(tmp_path, {"a": says(b"x" * 700), "b": says()}, **small) as flows:
        await flows.deploy(joins)
        assert (await flows.call(b"x" * 90)).status == 413, "what is joined counts too"
        assert (await flows.runs())[0]["status"] == 413
    async with workflow_world(tmp_path / "no", FUNCTIONS, workflow_runs=0) as flows:
        await flows.deploy(CHAIN)
        said = await flows.call()
        assert (said.status, said.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("second", "firsts"),
    [
        ("after: first", 0),
        ("after: first, optional: true", 1),
        ("after: first, when: status == 500", 1),
        ("after: first, retries: 1", 1),
    ],
)
async def test_workflow_is_refused_before_its_first_stage_when_a_later_one_would_be(
    tmp_path: Path, second: str, firsts: int
) -> None:
    may_answer = asyncio.Event()

    async def held(got: Got, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await says()(got, writer)

    async with workflow_world(tmp_path, {"a": says_json(b"{}"), "b": held}) as flows:
        wishes = {"com.gpufaas.concurrency": "1", "com.gpufaas.max-wait": "20ms"}
        alone = {"com.openfaas.scale.max": "1"}
        assert (await flows.world.deploy("b", annotations=wishes, labels=alone)).status == 202
        await flows.deploy(f"  first: {{function: a}}\n  second: {{function: b, {second}}}\n")
        await _two_calls(flows, may_answer, slow_s=0.2)  # from now on waits are known
        waiting = asyncio.create_task(_two_calls(flows, may_answer, slow_s=0.0))
        await eventually(lambda: len(flows.got["b"]) == 3)
        await _one_waits(flows)
        run = asyncio.create_task(flows.call())
        await eventually(lambda: run.done() or bool(flows.got["a"]))
        may_answer.set()
        said = await run
        await waiting
        assert len(flows.got["a"]) == firsts
        if not firsts:
            assert said.status == 429
            assert int(said.headers["retry-after"]) >= 1
            assert await flows.runs() == []


async def _two_calls(flows: WorkflowWorld, may_answer: asyncio.Event, slow_s: float) -> None:
    """Two calls of b, one of which waits for the other; with `slow_s` they end after so long."""
    calls = [asyncio.create_task(flows.call(path="/function/b")) for _ in range(2)]
    if slow_s:
        await _one_waits(flows)
        await asyncio.sleep(slow_s)
        may_answer.set()
    assert [(await call).status for call in calls] == [200, 200]
    if slow_s:
        may_answer.clear()


async def _one_waits(flows: WorkflowWorld) -> None:
    waiting = 'gpufaas_gateway_calls_waiting{function_name="b.openfaas-fn"} 1'
    while waiting not in (await flows.world.get("/metrics")).body:
        await asyncio.sleep(0.01)


async def test_run_is_one_trace_and_counted(tmp_path: Path) -> None:
    async with workflow_world(tmp_path, FUNCTIONS) as flows:
        await flows.deploy(CHAIN, "workflow: w\nslo_ms: 1")
        trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
        await flows.call(headers={"X-Call-Id": "one", "traceparent": trace})
        spans = (await flows.world.get("/system/traces/one")).body["spans"]

        assert {span["trace_id"] for span in spans} == {"1" * 32}
        (root,) = [span for span in spans if span["name"] == "workflow w.openfaas-fn"]
        assert root["parent_id"] == "2" * 16
        stages = {
            span["attributes"].get("gpufaas.stage"): span["parent_id"]
            for span in spans
            if span["name"].startswith("call ")
        }
        assert stages == {"first": root["span_id"], "second": root["span_id"]}
        text = (await flows.world.get("/metrics")).body
        assert 'gpufaas_gateway_workflow_runs_total{code="200",slo="m' in text
        assert "gpufaas_gateway_workflows_running 0.0" in text


async def test_slo_that_cannot_be_met_is_refused_with_the_fastest_time(tmp_path: Path) -> None:
    functions = {"a": says(delay_s=0.03), "b": says(delay_s=0.03)}
    async with workflow_world(tmp_path, functions) as flows:
        for name in ["a", "b"] * LEAST_CALLS:
            assert (await flows.call(path=f"/function/{name}")).status == 200
        for name in "ab":  # one each is in time, however slow the machine is
            flows.world.gateway.meters.ended(f"{name}.openfaas-fn", 200, 0.03)
        chain = "  first: {function: a}\n  second: {function: b, after: first}\n"
        said = await flows.deploy(chain, "workflow: w\nslo_ms: 20")
        assert said.status == 400
        assert "cannot end within 0.02 s: the fastest calls" in said.body
        assert "more than 0.05 s together" in said.body
        assert (await flows.deploy(chain, "workflow: w\nslo_ms: 60")).status == 202
        assert (await flows.world.get("/system/workflow/w")).body["fastestMs"] == 50.0


def test_fastest_time_is_that_of_the_longest_path() -> None:
    plan = read_workflow(
        json.dumps(
            {
                "workflow": "w",
                "stages": {
                    "a": {"function": "f"},
                    "b": {"function": "g", "after": "a"},
                    "c": {"function": "f", "after": "a"},
                    "d": {"function": "g", "after": "a", "when": "status == 200"},
                    "e": {"function": "unknown", "after": ["b", "c", "d"]},
                },
            }
        )
    )
    name = {short: str(FunctionId("openfaas-fn", short)) for short in "fgh"}
    counts = {name["f"]: [0, LEAST_CALLS, 0], name["g"]: [0, 0, 50], name["h"]: [0, 1, 0]}
    least_s = least_times(counts, [1.0, 2.0])

    assert least_s == {name["f"]: 1.0, name["g"]: 2.0}
    assert fastest_s(plan, least_s) == 3.0


def test_only_files_of_workflows_are_read_from_the_store(tmp_path: Path) -> None:
    (tmp_path / "sub.yml").mkdir()
    (tmp_path / ".half").mkdir()
    (tmp_path / "x.notes.txt").write_text("mine")
    for name in ("README.yml", "a b.team.yml", "w.team.yml"):
        (tmp_path / name).write_text("hello: [")
    (tmp_path / "good.openfaas-fn.yml").write_text("workflow: good\nstages: {a: {function: a}}")
    workflows = Workflows(tmp_path)
    workflows.open()
    assert set(workflows.refused) == {"README", "a b.team", "w.team"}
    assert str(tmp_path / "README.yml") in workflows.refused["README"]
    assert {str(workflow) for workflow in workflows.texts()} == {"good.openfaas-fn", "w.team"}
    assert len(list(tmp_path.iterdir())) == 7, "nothing is removed"
