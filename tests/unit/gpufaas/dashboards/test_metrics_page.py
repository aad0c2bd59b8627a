"""docs/metrics.md equals the code's output."""

import re

import pytest

from common.telemetry.metrics import Metric, MetricKind
from gpufaas.dashboards.metrics_page import PAGE, PROCESSES, rewritten
from tests.kit.places import ROOT

EVERY = [metric for metrics in PROCESSES.values() for metric in metrics]


def test_page_is_current() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert rewritten(text, ROOT) == text, "python -m gpufaas.dashboards.metrics_page rewrites it"


def test_page_without_a_place_for_a_table_is_refused() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no place for gateway"):
        rewritten(text.replace("<!-- end gateway -->", ""), ROOT)


def test_names_are_used_once() -> None:
    names = [metric.name for metric in EVERY]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_name_has_kind_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert bool(metric.bounds) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.bounds) == sorted(metric.bounds)
    assert "|" not in metric.help_text
    assert not {"request", "call", "lease", "job"} & set(metric.labels), "labels are bounded"
