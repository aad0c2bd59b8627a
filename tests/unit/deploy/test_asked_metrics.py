"""Dashboards and rules ask for metrics that processes export or Prometheus records."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.telemetry.metrics import Metric, MetricKind
from deploy.metrics_page import ALERTS, PROCESSES, RECORDED, rules_of
from tests.kit.places import ROOT

DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
_PANELS = {"row", "timeseries", "stat", "bargauge", "table"}


def exported() -> set[str]:
    """Every series that Prometheus has of our processes and by our rules."""
    recorded = {rule["record"] for rule in rules_of(ROOT / RECORDED)}
    return recorded.union(
        *(series_of(metric) for metrics in PROCESSES.values() for metric in metrics)
    )


def series_of(metric: Metric) -> Iterable[str]:
    parts = ("_bucket", "_count", "_sum") if metric.kind is MetricKind.HISTOGRAM else ("",)
    return (f"{metric.name}{part}" for part in parts)


def asked(expr: str) -> set[str]:
    """Our metrics in an expression of PromQL."""
    return set(
        re.findall(r"\b(?:gpufaas|gateway|provider)_?[\w:]+", re.sub(r'"[^"]*"', '""', expr))
    )


def shown_panels(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in page["panels"] if panel["type"] != "row"]


def test_rules_ask_for_metrics_that_there_are() -> None:
    series = exported()
    for rule in (*rules_of(ROOT / ALERTS), *rules_of(ROOT / RECORDED)):
        assert asked(rule["expr"]) <= series, rule


@pytest.mark.parametrize("path", DASHBOARDS, ids=[path.stem for path in DASHBOARDS])
def test_dashboard_asks_for_metrics_that_there_are(path: Path) -> None:
    page = json.loads(path.read_text(encoding="utf-8"))
    chosen = page["templating"]["list"]
    exprs = [target["expr"] for panel in shown_panels(page) for target in panel["targets"]]
    exprs += [choice["definition"] for choice in chosen if choice["type"] == "query"]
    names = {choice["name"] for choice in chosen} | {"__rate_interval", "__range", "1", "2"}

    assert set().union(*map(asked, exprs)) <= exported()
    assert {name for expr in exprs for name in re.findall(r"\$(\w+)", expr)} <= names


@pytest.mark.parametrize("path", DASHBOARDS, ids=[path.stem for path in DASHBOARDS])
def test_dashboard_needs_no_plugin_and_takes_its_source_from_the_reader(path: Path) -> None:
    page = json.loads(path.read_text(encoding="utf-8"))

    assert {panel["type"] for panel in page["panels"]} <= _PANELS
    assert {panel["datasource"]["uid"] for panel in shown_panels(page)} == {"${datasource}"}


def test_dashboards_are_three_with_titles_of_their_own() -> None:
    pages = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]

    assert [path.stem for path in DASHBOARDS] == ["functions", "gpus", "overview"]
    assert len({page["uid"] for page in pages}) == len({page["title"] for page in pages}) == 3
