"""What a person sees of workflows on the page."""

from typing import Any

import pytest

from tests.e2e.page.opener import Opener
from tests.kit.page.generated_cluster import GeneratedCluster

STAGES: list[dict[str, Any]] = [
    {"name": "first", "function": "f", "after": [], "level": 0, "mean_s": 0.1, "share": 0.25},
    {"name": "left", "function": "f", "after": ["first"], "level": 1, "mean_s": 0.3, "share": 0.75},
    {"name": "<b>", "function": "g", "after": ["first"], "level": 1, "mean_s": None, "share": None},
]
WORKFLOW: dict[str, Any] = {
    "id": "w.openfaas-fn", "name": "w", "namespace": "openfaas-fn", "slo_s": 2.0, "runs": 3,
    "running": 1, "missed": 1, "median_s": 0.4, "last": 502, "why": "stage <b>: it broke off",
    "stages": STAGES,
}  # fmt: skip


def test_workflow_is_drawn_with_each_stages_share_of_the_time(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    assert page.run("document.getElementById('workflows').hidden") is True
    cluster.workflows = [WORKFLOW]
    page.until("document.querySelectorAll('.workflow-box').length === 3")
    shown = page.text("#workflows")
    assert "3 runs, median 400 ms, 1 under way, SLO 2.00 s, 1 missed" in shown
    assert "25 %, 100 ms" in shown
    assert "stage <b>: it broke off" in shown
    bars = "[...document.querySelectorAll('.workflow-share')]"
    first, left, none = page.run(f"{bars}.map((one) => one.width.baseVal.value)")
    assert (first, none) == (pytest.approx(left / 3), 0)
    assert page.run("document.querySelectorAll('.workflow-line').length") == 2
    label = page.run("document.querySelector('.workflow-graph svg').getAttribute('aria-label')")
    assert label == "first, 25 % of the time; left after first, 75 % of the time; <b> after first"
    cluster.workflows = []
    page.until("document.getElementById('workflows').hidden")
