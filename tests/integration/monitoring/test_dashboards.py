"""Grafana's dashboards against a live Prometheus: no panel is empty, every variable has values.

Grafana itself is not run: its provisioning has to name the folder and the source.
"""

import json
import re
from functools import partial
from typing import Any

import pytest
import yaml

from tests.integration.monitoring.watched import Watched
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

PAGES = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
}
PANELS = [
    pytest.param(panel, id=f"{name}-{panel['title'].replace(' ', '-')}")
    for name, page in PAGES.items()
    for panel in page["panels"]
    if panel["type"] != "row"
]
# What Grafana puts in: here the whole life of the stack, whatever else the machine does meanwhile.
_PUT_IN = {"$__rate_interval": "15m", "$__range": "15m"}
_SCRAPED_S = 30.0


@pytest.mark.slow
@pytest.mark.parametrize("panel", PANELS)
def test_panel_shows_numbers_with_the_labels_of_its_legends(
    panel: dict[str, Any], watched: Watched
) -> None:
    for target in panel["targets"]:
        expr = put_in(target["expr"])
        # There is nothing for a moment where a process was held up when it was scraped.
        wait_until(
            partial(watched.prometheus.numbers, expr),
            f"{panel['title']}: something for {target['expr']}",
            within_s=_SCRAPED_S,
        )
        labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for metric, _ in watched.prometheus.values(expr):
            assert labels <= metric.keys(), f"{panel['title']}: {metric}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_variables_have_values(page: dict[str, Any], watched: Watched) -> None:
    queries = [each["definition"] for each in page["templating"]["list"] if each["type"] == "query"]
    for query in queries:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert watched.prometheus.ask(f"label/{label}/values", **{"match[]": metric})


def test_provisioning_names_the_folder_and_the_source() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    sources = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    assert [(one["type"], one["isDefault"]) for one in sources] == [("prometheus", True)]
    (provider,) = yaml.safe_load((folder / "dashboards/gpufaas.yml").read_text())["providers"]
    compose = (ROOT / "docker-compose.yml").read_text()
    assert f"deploy/grafana/dashboards:{provider['options']['path']}:ro" in compose


def put_in(expr: str) -> str:
    """As Grafana sends it: everything is chosen."""
    for name, value in _PUT_IN.items():
        expr = expr.replace(name, value)
    return re.sub(r"\$(gpu|model|function)\b", ".*", expr)
