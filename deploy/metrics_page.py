"""`python -m deploy.metrics_page`: writes docs/metrics.md's tables from the code."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from common.telemetry.metrics import Metric, MetricKind
from deploy.generated_blocks import with_blocks
from gateway_ext import metrics as of_gateway
from gpu_manager import metrics as of_node
from scheduler.service import scheduler_service as of_scheduler

PAGE = Path("docs/metrics.md")
ALERTS = Path("deploy/prometheus/rules/alerts.yml")
RECORDED = Path("deploy/prometheus/rules/recording.yml")
PROCESSES: Mapping[str, tuple[Metric, ...]] = {
    "scheduler": tuple(of_scheduler.METRICS),
    "gateway": of_gateway.METRICS,
    "gpu-manager": of_node.METRICS,
}


def rewritten(text: str, root: Path) -> str:
    """The page with current tables; other text stays."""
    return with_blocks(text, _tables(root))


def main() -> int:
    """Rewrite the page; with --check, only report whether it is current."""
    parser = argparse.ArgumentParser(prog="deploy.metrics_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if it is old")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    after = rewritten(before, Path())
    if check:
        print("current" if before == after else "python -m deploy.metrics_page rewrites it")
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


def _tables(root: Path) -> dict[str, str]:
    tables = {name: _metrics(metrics) for name, metrics in PROCESSES.items()}
    tables["recorded"] = _recorded(rules_of(root / RECORDED))
    tables["alerts"] = _alerts(rules_of(root / ALERTS))
    return tables


def rules_of(path: Path) -> list[dict[str, Any]]:
    """The rules of all groups in a file of Prometheus rules."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _metrics(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in sorted(metrics, key=lambda metric: metric.name):
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        kind = "counter" if metric.kind is MetricKind.UNTYPED else metric.kind
        lines.append(f"| `{metric.name}` | {kind} | {labels} | {metric.help_text} |")
    return "\n".join(lines) + "\n"


def _recorded(rules: Iterable[Mapping[str, Any]]) -> str:
    lines = ["| recorded | expression |", "| --- | --- |"]
    for rule in rules:
        expression = " ".join(rule["expr"].split()).replace("|", "\\|")
        lines.append(f"| `{rule['record']}` | `{expression}` |")
    return "\n".join(lines) + "\n"


def _alerts(rules: Iterable[Mapping[str, Any]]) -> str:
    lines = ["| alert | after | means | what to do |", "| --- | --- | --- | --- |"]
    for rule in rules:
        notes = {key: " ".join(text.split()) for key, text in rule["annotations"].items()}
        name = f"`{rule['alert']}` ({rule['labels']['severity']})"
        after = rule.get("for", "0s")
        lines.append(f"| {name} | {after} | {notes['description']} | {notes['action']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
