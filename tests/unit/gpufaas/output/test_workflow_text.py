"""Runs of workflows as text."""

from pathlib import Path
from typing import Any

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.output.workflow_text import runs_text


def a_run(*, running: bool, **stages: dict[str, Any]) -> dict[str, Any]:
    usual = {"skipped": False, "status": 0, "attempts": 1, "beganMs": 1.0, "tookMs": 2.0, "why": ""}
    return {
        "callId": "c1", "at": 0.0, "status": 0 if running else 500, "running": running, "slo": "",
        "tookMs": 3.0, "why": "" if running else "bad answered 500",
        "stages": {name: usual | stage for name, stage in stages.items()},
    }  # fmt: skip


def test_stage_that_was_ended_with_its_run_says_so() -> None:
    bad = {"status": 500, "why": "f answered 500"}
    lines = list(runs_text([a_run(running=False, bad=bad, beside={})]))
    assert lines[0].endswith("c1 500 3 ms bad answered 500")
    assert lines[1] == "  bad: after 1 ms, took 2 ms, 500, f answered 500"
    ended = "  beside: after 1 ms, took 2 ms, not finished: the run ended before it"
    assert lines[2] == ended


def test_stage_of_a_run_that_goes_on_is_running() -> None:
    assert list(runs_text([a_run(running=True, beside={})]))[1].endswith("took 2 ms, running")


def test_file_is_checked_alone_and_its_stages_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "diamond.yml"
    file.write_text(
        "workflow: diamond\nstages:\n"
        "  top: {function: f}\n"
        "  left: {function: g, after: [top]}\n"
        "  right: {function: g, after: [top]}\n"
        "  join: {function: h, after: [left, right]}\n"
    )
    assert main(["workflow", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "diamond.openfaas-fn: 4 stages",
        "  top  f.openfaas-fn",
        "    left  g.openfaas-fn  after top",
        "    right  g.openfaas-fn  after top",
        "      join  h.openfaas-fn  after left, right",
    ]
    file.write_text("workflow: x\nstages:\n  a: {function: b, after: [gone]}\n")
    assert main(["workflow", "check", str(file)]) == EXIT_BAD_USE
    assert f"{file}:3: a: after names the unknown stage gone" in capsys.readouterr().err
