"""Rows of the shim's benches: what they compare, and how they are shown and kept."""

import json
from pathlib import Path

import pytest

from bench.measure.comparisons import RATIO, US, ComparisonRow, compared, extra, keep_rows, ratio
from bench.measure.function_orders import OrderResult


def answer(*seconds: float, compute_s: float = 0.0) -> OrderResult:
    return OrderResult(list(seconds), calls=len(seconds), compute_s=compute_s)


def test_row_compares_within_each_round_when_the_machine_slows_down() -> None:
    quiet = (answer(1.0), answer(2.0))
    busy = (answer(10.0), answer(20.0))
    odd = (answer(1.0), answer(9.0))

    row = compared("calls", [quiet, busy, odd], ratio, RATIO)

    assert row.value == 2.0
    assert row.rounds == [2.0, 2.0, 9.0]


def test_row_takes_the_median_call_when_one_is_slow() -> None:
    pairs = [(answer(1.0, 1.0, 50.0), answer(3.0, 90.0, 3.0))]

    assert compared("calls", pairs, extra, US).value == 2.0


def test_row_spreads_worker_times_over_calls_when_there_are_rounds() -> None:
    pairs = [(answer(1.0), answer(1.0, 1.0, compute_s=1.0))] * 2

    assert compared("calls", pairs, extra, US).more["worker_compute_s"] == 0.5


@pytest.mark.parametrize(
    ("value", "target", "said"),
    [(240e-6, 250e-6, "yes"), (251e-6, 250e-6, "no"), (1.0, None, "")],
)
def test_row_says_whether_its_target_is_met_when_it_has_one(
    value: float, target: float | None, said: str
) -> None:
    line = ComparisonRow("call", value, US, target).line()

    assert line.split("|")[-2].strip() == said


def test_rows_are_kept_beside_the_page_when_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.measure.comparisons.RESULTS", tmp_path)
    rows = [ComparisonRow("call", 1.5, RATIO, 1.1, native=1.0, ours=1.5)]

    path = keep_rows({"torch": "2"}, rows, tmp_path / "2026-01-01-shim.md")

    assert path.name == "2026-01-01-shim.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["torch"] == "2"
    assert found["rows"][0]["value"] == 1.5
    assert found["rows"][0]["met"] is False
