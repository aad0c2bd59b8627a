"""Workflows as the page gets them."""

from pathlib import Path

import pytest

from gateway_ext.workflows.history import RunHistory
from gateway_ext.workflows.parts import WorkflowRows, left_out
from gateway_ext.workflows.plan import read_workflow
from gateway_ext.workflows.table import Workflows

TEXT = """
workflow: w
slo_ms: 1000
stages:
  a: {function: f}
  b: {function: f, after: a}
  c: {function: g, after: [a, b]}
"""


async def test_rows_have_levels_and_shares_and_are_made_anew_only_after_a_change(
    tmp_path: Path,
) -> None:
    workflows, history = Workflows(tmp_path), RunHistory()
    rows = WorkflowRows(workflows, history)
    assert rows.look() == []
    plan = read_workflow(TEXT)
    await workflows.deploy(plan, update=False)
    (row,) = rows.look()
    assert (row["runs"], row["median_s"], row["last"]) == (0, None, None)
    assert [(one["level"], one["share"]) for one in row["stages"]] == [
        (0, None),
        (1, None),
        (2, None),
    ]

    record = history.begin(plan, "call")
    assert rows.look()[0]["running"] == 1
    for name, took_s in {"a": 1.0, "b": 3.0}.items():
        stage = record.stage(name)
        stage.began_s, stage.ended_s = 5.0, 5.0 + took_s
    record.stage("c").skipped = True
    history.end(record, 502, "stage c: no")
    (row,) = rows.look()
    assert (row["runs"], row["running"], row["missed"], row["last"]) == (1, 0, 1, 502)
    assert row["why"] == "stage c: no"
    assert [one["share"] for one in row["stages"]] == [
        pytest.approx(0.25),
        pytest.approx(0.75),
        None,
    ]
    assert rows.look() is rows.look()
    await workflows.remove(plan.id)
    assert rows.look() == []


def test_alert_names_a_stored_workflow_that_is_left_out_and_why() -> None:
    (alert,) = left_out({"w.openfaas-fn": "line 2: no stages"})
    assert (alert["code"], alert["about"]) == ("workflow-left-out", "w.openfaas-fn")
    assert alert["text"] == "the stored workflow w.openfaas-fn is left out: line 2: no stages"
