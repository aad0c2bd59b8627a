"""What the processes really export is what the code declares, and the page says."""

import re
from collections.abc import Mapping

import httpx
import pytest

from common.telemetry.metrics import Metric, MetricKind
from deploy.metrics_page import PROCESSES
from tests.integration.monitoring.watched import Watched
from tests.kit.waiting import PATIENCE_S, wait_until

# Without a label's value there is no line: these need what a healthy stack has not.
_ONLY_IN_TROUBLE = {
    "gpufaas_gateway_retries_total",
    "gpufaas_gateway_cut_answers_total",
    "gpufaas_node_single_calls_total",
    "gpufaas_scheduler_owner_refused_requests_total",
}
# The stack has no function whose handler takes lists.
_NEED_LISTS = {
    "gpufaas_gateway_batches_total",
    "gpufaas_gateway_batched_calls_total",
}
# NVML has to be asked, and emulated GPUs have none: the tests of dashboards have a stand-in.
_NEED_NVML = {
    "gpufaas_node_device_used_bytes",
    "gpufaas_node_ledger_drift_bytes",
    "gpufaas_node_gpu_utilisation_ratio",
}
# An emulated GPU moves nothing over a PCIe unless that is emulated, too.
_NEED_PCIE = {
    "gpufaas_node_transferred_bytes_total",
    "gpufaas_node_transfer_wait_seconds_total",
}


@pytest.mark.slow
@pytest.mark.parametrize(("process", "metrics"), PROCESSES.items(), ids=list(PROCESSES))
def test_process_exports_what_is_declared_and_nothing_else(
    process: str, metrics: tuple[Metric, ...], watched: Watched
) -> None:
    page, of_itself = parted(httpx.get(watched.pages[process], timeout=PATIENCE_S).text)
    declared = {metric.name: metric for metric in metrics}
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    assert "process_resident_memory_bytes" in of_itself
    assert types == {name: str(metric.kind) for name, metric in declared.items()}
    found = labels_by_metric(page, declared)
    absent = _NEED_LISTS | _NEED_NVML | _NEED_PCIE
    # A machine that holds processes up may have been trouble enough.
    assert set(declared) - set(found) - _ONLY_IN_TROUBLE == absent & set(declared)
    for name, labels in found.items():
        assert labels == set(declared[name].labels)


@pytest.mark.slow
def test_prometheus_takes_all_of_it_without_complaint(watched: Watched) -> None:
    # A scrape takes a second at most: one of a process that was held up has failed.
    wait_until(lambda: watched.prometheus.numbers("up") == [1.0] * 4, "all four are scraped")
    rules = watched.prometheus.ask("rules")["groups"]
    assert [
        rule["lastError"] for group in rules for rule in group["rules"] if "lastError" in rule
    ] == []
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}


@pytest.mark.slow
def test_healthy_stack_raises_no_alert_beyond_what_it_was_asked_for(watched: Watched) -> None:
    firing = watched.prometheus.values('ALERTS{alertstate="firing"}')
    assert {labels["alertname"] for labels, _ in firing} == set()


@pytest.mark.slow
def test_node_answers_health_checks_where_it_shows_metrics(watched: Watched) -> None:
    base = watched.pages["gpu-manager"].removesuffix("/metrics")
    assert httpx.get(f"{base}/healthz", timeout=PATIENCE_S).status_code == httpx.codes.OK
    assert httpx.get(f"{base}/readyz", timeout=PATIENCE_S).text == "ready\n"


def labels_by_metric(page: str, declared: Mapping[str, Metric]) -> dict[str, set[str]]:
    """The labels of each metric that has at least one line; every line is of one."""
    found: dict[str, set[str]] = {}
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        matched = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line)
        assert matched is not None, line
        name = matched[1]
        if name not in declared:
            name = re.sub(r"_(bucket|sum|count)$", "", name)
            assert declared[name].kind is MetricKind.HISTOGRAM, line
        labels = set(re.findall(r'(\w+)="', matched[2] or "")) - {"le"}
        found.setdefault(name, set()).update(labels)
    return found


def parted(page: str) -> tuple[str, str]:
    """What a process counts, and what every Python program says of itself."""
    any_program = re.compile(r"(# \w+ )?(process|python)_")
    lines = page.splitlines(keepends=True)
    counted = "".join(line for line in lines if not any_program.match(line))
    return counted, "".join(line for line in lines if any_program.match(line))
