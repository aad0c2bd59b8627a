"""docs/metrics.md equals the code's output."""

import re

import pytest

from common.telemetry.metrics import Metric, MetricKind
from deploy.metrics_page import PAGE, PROCESSES, rewritten
from tests.kit.places import ROOT

EVERY = [metric for metrics in PROCESSES.values() for metric in metrics]


def test_page_is_current() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert rewritten(text, ROOT) == text, "python -m deploy.metrics_page rewrites it"


def test_page_without_a_place_for_a_table_is_refused() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no place for gateway"):
        rewritten(text.replace("<!-- end gateway -->", ""), ROOT)


def test_names_are_used_once() -> None:
    names = [metric.name for metric in EVERY]
    assert sorted(names) == sorted(set(names))


def test_names_have_kind_and_unit() -> None:
    faults = {metric.name: faults_of(metric) for metric in EVERY}

    assert faults
    assert {name: found for name, found in faults.items() if found} == {}


def faults_of(metric: Metric) -> list[str]:
    """Which rules the metric breaks."""
    rules = {
        "its name is of small letters": bool(re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)),
        "a counter alone ends in _total": metric.name.endswith("_total")
        == (metric.kind is MetricKind.COUNTER),
        "a histogram alone has bounds": bool(metric.bounds)
        == (metric.kind is MetricKind.HISTOGRAM),
        "its bounds rise": list(metric.bounds) == sorted(metric.bounds),
        "its help fits into a table": "|" not in metric.help_text,
        "its labels are bounded": not {"request", "call", "lease", "job"} & set(metric.labels),
    }
    return [f"not so: {rule}" for rule, holds in rules.items() if not holds]
