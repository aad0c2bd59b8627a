"""Metrics of workflows: of those that there are."""

from gateway_ext.workflows.history import RunRecord, WorkflowMeters
from gateway_ext.workflows.limits import RunLimits
from gateway_ext.workflows.plan import WorkflowId

STAYS = WorkflowId("dev", "stays")


def test_run_that_outlives_its_workflow_leaves_no_metric() -> None:
    plans = {STAYS: "a plan"}
    meters = WorkflowMeters(RunLimits(9, 9, 9, 9), 3, plans.get)
    for number in range(10):
        gone = WorkflowId("dev", f"w{number}")
        plans[gone] = "another"
        record = RunRecord(gone, "c")
        del plans[gone]
        meters.gone(str(gone))
        record.end(200)
        meters.ended(record)
    kept = RunRecord(STAYS, "c")
    kept.end(200)
    meters.ended(kept)

    lines = "\n".join(line for family in meters.families() for line in family.lines())
    assert "stays" in lines
    assert 'workflow="w' not in lines
    assert "other" not in lines, "the names of those that are gone take no place"
