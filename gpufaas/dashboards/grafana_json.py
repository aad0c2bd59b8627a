"""Dashboards of rows, panels and queries, and their JSON for Grafana."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_SCHEMA = 39
_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Shape(StrEnum):
    """Kinds of panels, all built into Grafana."""

    LINES = "timeseries"
    NUMBER = "stat"
    BARS = "bargauge"
    TABLE = "table"


_HEIGHTS = {Shape.LINES: 8, Shape.NUMBER: 4, Shape.BARS: 8, Shape.TABLE: 8}
_AT_ONCE = frozenset({Shape.BARS, Shape.TABLE})


@dataclass(frozen=True, slots=True)
class PromQuery:
    """A PromQL expression, with the legend of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `unit` is one of Grafana's, `description` explains it.

    `stacked` lines are parts of a whole; `least` and `most` bound the axis unless None.
    """

    title: str
    queries: tuple[PromQuery, ...]
    unit: str
    description: str = ""
    shape: Shape = Shape.LINES
    width: int = 8
    stacked: bool = False
    least: float | None = 0.0
    most: float | None = None


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A heading with the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the dashboard: the values of a metric's label."""

    name: str
    title: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    variables: tuple[Variable, ...] = ()

    @property
    def panels(self) -> list[Panel]:
        """The panels of all rows."""
        return [panel for row in self.rows for panel in row.panels]


def as_json(dashboard: Dashboard) -> str:
    """The dashboard's JSON for Grafana's import and provisioning."""
    page = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["gpufaas"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [_link()],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": list(_placed(dashboard.rows)),
    }
    return json.dumps(page, indent=1, ensure_ascii=False) + "\n"


def _placed(rows: Iterable[PanelRow]) -> Iterable[dict[str, Any]]:
    """Each panel with its position, from left to right and in rows."""
    number, top = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
        }
        top += 1
        left = tallest = 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            number += 1
            height = _HEIGHTS[panel.shape]
            at = {"x": left, "y": top, "w": panel.width, "h": height}
            yield {"id": number, "gridPos": at} | _panel(panel)
            left, tallest = left + panel.width, max(tallest, height)
        top += tallest


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": _custom(panel)}
    if panel.least is not None:
        defaults["min"] = panel.least
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "type": panel.shape,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.shape),
        "targets": list(_targets(panel)),
        "transformations": _transformations(panel.shape),
    }


def _targets(panel: Panel) -> Iterable[dict[str, Any]]:
    at_once = panel.shape in _AT_ONCE
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        yield {
            "refId": letter,
            "datasource": _SOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "format": "table" if panel.shape is Shape.TABLE else "time_series",
            "instant": at_once,
            "range": not at_once,
        }


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.shape is not Shape.LINES:
        return {}
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 25 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }


def _options(shape: Shape) -> dict[str, Any]:
    latest = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if shape is Shape.NUMBER:
        return {"reduceOptions": latest, "colorMode": "value", "graphMode": "area"}
    if shape is Shape.BARS:
        return {"reduceOptions": latest, "orientation": "horizontal", "displayMode": "gradient"}
    if shape is Shape.TABLE:
        return {"showHeader": True, "sortBy": [{"displayName": "Value", "desc": True}]}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _transformations(shape: Shape) -> Sequence[dict[str, Any]]:
    if shape is not Shape.TABLE:
        return []
    return [{"id": "organize", "options": {"excludeByName": {"Time": True}}}]


def _link() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "gpufaas",
        "tags": ["gpufaas"],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": True,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    asked = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": _SOURCE,
        "definition": asked,
        "query": {"query": asked, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
