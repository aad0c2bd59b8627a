"""Figures of rounds beside the goals."""

import json
from pathlib import Path

import pytest

from bench.gateway.call_cases import ONE, Answering, CallCase, CallKind
from bench.gateway.call_tables import show_calls
from bench.measure.call_costs import CallCosts
from bench.measure.load_figures import LoadFigures
from bench.measure.report import BenchReport

COMPUTING = CallCase(CallKind.COMPUTING, Answering.GPUFAAS)
PEER = CallCase(CallKind.COMPUTING, Answering.LITSERVE)


def some_costs(rate: float) -> dict[int, CallCosts]:
    figures = LoadFigures(rate, 0.5 / rate, 1 / rate, 0, 0.1)
    costs = CallCosts(figures, {"scheduler": 0.0004, "gateway": 0.0006}, 0.1)
    return dict.fromkeys(COMPUTING.clients, costs)


def a_report(*rates: float) -> BenchReport:
    report = BenchReport("A bench", "python -m bench")
    runs = {COMPUTING: [some_costs(rate) for rate in rates], PEER: [some_costs(1_000.0)]}
    show_calls(report, runs)
    return report


def test_figures_are_medians_of_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    report = a_report(3_000.0, 1_600.0, 900.0)

    shown = capsys.readouterr().out
    assert "| GPU call that computes | gpufaas | 32 | 1,600.0 | 0.31 |" in shown
    assert "- LitServe, GPU call that computes" not in shown
    assert "- gpufaas, GPU call that computes: gateway 0.600, scheduler 0.400" in shown
    assert "against LitServe: 1.60 at 1, 1.60 at 32, 1.60 at 256 clients" in shown
    assert isinstance(report.facts["calls"], list)


@pytest.mark.parametrize(("rate", "reached"), [(1_600.0, "yes"), (1_400.0, "NO")])
def test_goals_say_whether_they_are_reached(
    rate: float, reached: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a_report(rate)

    shown = capsys.readouterr().out
    row = f"| GPU call that computes: calls/s, at least | 32 | 1,500 | {rate:,.0f} | {reached} |"
    assert row in shown
    assert "CPU ms a call of all parts, at most | 32 | 1.30 | 1.00 | yes |" in shown


def test_facts_are_kept_as_json_beside_the_markdown(tmp_path: Path) -> None:
    report = a_report(1_600.0, 1_700.0)

    kept = json.loads(report.keep_facts(tmp_path / "2026-gateway.md").read_text(encoding="utf-8"))

    assert (tmp_path / "2026-gateway.json").exists()
    assert kept["command"] == "python -m bench"
    (first, *_), (peer, *_) = (
        [row for row in kept["calls"] if row["system"] == system]
        for system in ("gpufaas", "LitServe")
    )
    assert (first["clients"], first["rate"], len(first["rounds"])) == (ONE, 1_650.0, 2)
    assert peer["processor_s"] == {"gateway": 0.0006, "scheduler": 0.0004}
