"""Grafana's dashboards against a live Prometheus: no panel is empty, every variable has values.

Grafana itself is not run: what its provisioning reads is checked for what it needs.
"""

import json
import re
from functools import partial

import pytest
import yaml

from gpufaas.dashboards.__main__ import DASHBOARDS, FOLDER
from gpufaas.dashboards.grafana_json import Dashboard, Panel, as_json
from tests.integration.monitoring.watched import Watched
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

PANELS = [
    pytest.param(panel, id=f"{name.removesuffix('.json')}-{panel.title.replace(' ', '-')}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard.panels
]
# What Grafana puts in: here the whole life of the stack, whatever else the machine does meanwhile.
_PUT_IN = {"$__rate_interval": "15m", "$__range": "15m"}
_SCRAPED_S = 30.0
_PLUGINS = {"row", "timeseries", "stat", "bargauge", "table"}
_UNITS = {"none", "s", "bytes", "percentunit", "reqps", "ops"}


@pytest.mark.slow
@pytest.mark.parametrize("panel", PANELS)
def test_panel_shows_numbers(panel: Panel, watched: Watched) -> None:
    for query in panel.queries:
        expr = put_in(query.expr)
        # There is nothing for a moment where a process was held up when it was scraped.
        wait_until(
            partial(watched.prometheus.numbers, expr),
            f"{panel.title}: something for {query.expr}",
            within_s=_SCRAPED_S,
        )


@pytest.mark.slow
@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=list(DASHBOARDS))
def test_variables_have_values_and_labels_of_legends_exist(
    dashboard: Dashboard, watched: Watched
) -> None:
    for variable in dashboard.variables:
        path = f"label/{variable.label}/values"
        assert watched.prometheus.ask(path, **{"match[]": variable.metric})
    for panel in dashboard.panels:
        for query in panel.queries:
            labels = set(re.findall(r"{{(\w+)}}", query.legend))
            for metric, _ in watched.prometheus.values(put_in(query.expr)):
                assert labels <= metric.keys(), f"{panel.title}: {metric}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_json_is_what_the_code_makes(name: str) -> None:
    written = (ROOT / FOLDER / name).read_text(encoding="utf-8")
    assert written == as_json(DASHBOARDS[name]), "python -m gpufaas.dashboards rewrites it"


def test_no_other_dashboard_lies_about() -> None:
    assert {path.name for path in (ROOT / FOLDER).iterdir()} == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_json_has_what_grafana_wants(name: str) -> None:
    page = json.loads((ROOT / FOLDER / name).read_text(encoding="utf-8"))
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} <= _PLUGINS, "every Grafana has these"
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in shown} <= _UNITS
    for panel in shown:
        assert panel["datasource"]["uid"] == "${datasource}"
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids) > 0
        for target in panel["targets"]:
            known = {"datasource", *(each["name"] for each in page["templating"]["list"])}
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"1", "2"}
            assert used <= known | {"__rate_interval", "__range"}
    assert not overlapping(shown)


def test_uids_and_titles_are_unique() -> None:
    assert len({each.uid for each in DASHBOARDS.values()}) == len(DASHBOARDS)
    assert len({each.title for each in DASHBOARDS.values()}) == len(DASHBOARDS)


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


def overlapping(panels: list[dict[str, dict[str, int]]]) -> list[tuple[int, int]]:
    """Places on the page that two panels take."""
    taken: set[tuple[int, int]] = set()
    twice = []
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                if (x, y) in taken:
                    twice.append((x, y))
                taken.add((x, y))
    return twice
