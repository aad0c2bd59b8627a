"""Prometheus's configuration and rules, by its own tool."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.metrics_page import rules_of
from tests.kit import needs
from tests.kit.engines.prometheus_server import DEPLOY

ALERTS = rules_of(DEPLOY / "rules" / "alerts.yml")
TESTS = yaml.safe_load((DEPLOY / "tests" / "alerts.yml").read_text(encoding="utf-8"))["tests"]


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    program = needs.command("promtool", "prometheus")
    return subprocess.run(
        [str(program), *words], capture_output=True, text=True, timeout=240, check=False
    )


def test_configuration_is_good() -> None:
    said = promtool("check", "config", str(DEPLOY / "prometheus.yml"))
    assert said.returncode == 0, said.stdout + said.stderr


def test_alerts_fire_when_they_should_and_are_quiet_otherwise() -> None:
    said = promtool("test", "rules", str(DEPLOY / "tests" / "alerts.yml"))
    assert said.returncode == 0, said.stdout + said.stderr


def test_tests_of_alerts_fail_when_an_alert_never_fires_or_always(tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY, folder)
    alerts = folder / "rules" / "alerts.yml"
    whole = yaml.safe_load(alerts.read_text(encoding="utf-8"))
    wrong = itertools.cycle(("vector(0) > 1", "vector(1)"))
    for group in whole["groups"]:
        for rule in group["rules"]:
            rule["expr"] = next(wrong)
    alerts.write_text(yaml.safe_dump(whole), encoding="utf-8")
    said = promtool("test", "rules", str(folder / "tests" / "alerts.yml"))
    failed = re.findall(r'alertname=\\"(\w+)\\"', said.stdout + said.stderr)
    assert failed == [alert["alert"] for alert in ALERTS]


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_alert_says_what_it_means_and_what_to_do(alert: dict[str, dict[str, str]]) -> None:
    assert alert["labels"]["severity"] in {"page", "warn"}
    for text in ("summary", "description", "action"):
        assert len(alert["annotations"][text].strip()) > 10


def test_every_alert_has_both_tests() -> None:
    names = [alert["alert"].removeprefix("Gpufaas") for alert in ALERTS]
    assert [test["name"] for test in TESTS] == [
        f"{name} {what}" for name in names for what in ("fires", "is quiet")
    ]
