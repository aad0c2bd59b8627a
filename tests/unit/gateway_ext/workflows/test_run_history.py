"""What is kept of a workflow's runs."""

from gateway_ext.workflows.history import RunRecord
from gateway_ext.workflows.plan import WorkflowId


def test_stage_that_was_ended_with_its_run_takes_no_longer_than_the_run() -> None:
    run = RunRecord(WorkflowId("openfaas-fn", "w"), "c1", began_s=100.0)
    run.stage("beside").began_s = 101.0
    run.ended_s, run.status = 103.5, 500
    assert run.shown()["stages"]["beside"]["tookMs"] == 2500.0
