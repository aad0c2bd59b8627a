"""One small stack under a little load, watched by a Prometheus, for all tests here."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpufaas.remote.scheduler_api import in_path
from gpufaas.stack.held_ports import HeldPort
from tests.integration.monitoring.watched import Watched
from tests.kit.engines.prometheus_server import Prometheus, nvml_node, prometheus
from tests.kit.folder_fixtures import of_folder
from tests.kit.stacks.handlers import GREETING, ON_GPU, PLAIN, write
from tests.kit.stacks.stack import Rest, Stack, leases, stack
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.group("monitoring", seconds=80)  # of all modules here

# Calls go on until these are seen, on a slow machine too: leases that the gateway asked for, hits,
# measured runs, and the bill, which is counted every few seconds.
_SIGNS = (
    "rate(gpufaas_gateway_lease_seconds_count[2m]) > 0",
    'rate(gpufaas_scheduler_gpu_placements_total{result="hit"}[2m]) > 0',
    "rate(gpufaas_scheduler_function_wait_seconds_total[2m]) >= 0",
    'rate(gpufaas_scheduler_estimate_ratio_count{what="run"}[2m]) > 0',
    "gpufaas:model_estimate:ratio1h > 0",
    "rate(gpufaas_gateway_job_attempts_total[2m]) > 0",
    "gpufaas_scheduler_billed_gpu_seconds_total > 0",
    'gpufaas_scheduler_billed_byte_seconds_total{stage="idle"} > 0',
    "gpufaas_scheduler_billed_cost_total > 0",
)
# Before anything happens: what Prometheus has not seen to be zero does not grow for it.
_BEGIN = "gpufaas_scheduler_load_seconds_count == 0"
# The last that happens: Prometheus has seen it twice, as a rate of it needs.
_END = "count_over_time(gpufaas_scheduler_model_evictions_total[2m]) > 1"

_TWICE = """
workflow: twice
slo_ms: 10000
stages:
  once: {function: greets}
  again: {function: greets, after: once}
"""


@pytest.fixture(scope="module")
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("prometheus")
    return of_folder(request, Path(__file__).parent, lambda: _watched(folder))


@contextmanager
def _watched(folder: Path) -> Iterator[Watched]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("GPUFAAS_")
    }
    node = f"127.0.0.1:{HeldPort().keep()}"
    settings = {
        "GPUFAAS_NODE_METRICS": node,
        "GPUFAAS_SCHEDULER_METRICS_AUTH": "false",
        "GPUFAAS_BILLING_GPU_SECOND": "0.001",  # without a price nothing costs anything
    }
    with stack({**environment, **settings}) as up, nvml_node() as nvml:
        up.start()
        addresses = {
            "scheduler": up.scheduler_url.removeprefix("http://"),
            "gateway": up.url.removeprefix("http://"),
            "gpu-manager": node,
        }
        targets = {job: [address] for job, address in addresses.items()}
        targets["gpu-manager"].append(nvml)
        with prometheus(folder, targets) as watching:
            _load(up, watching)
            pages = {job: f"http://{address}/metrics" for job, address in addresses.items()}
            yield Watched(up, watching, pages)


def _missing(watching: Prometheus) -> list[str]:
    return [sign for sign in _SIGNS if not watching.numbers(sign)]


def _load(up: Stack, watching: Prometheus) -> None:
    """Calls of a plain function and of one on a GPU, at once and later, over several scrapes."""
    wait_until(lambda: watching.numbers(_BEGIN), "the beginning is scraped")
    rest = Rest(up)
    up.scheduler.put("/quotas/openfaas-fn", {"leases": 1_000})
    rest.deploy("greets", annotations={**write(up.work, "greets", GREETING), **PLAIN})
    login = ("admin", up.password)
    assert rest.http.post("/system/workflows", content=_TWICE, auth=login).status_code == 202
    _gpu_function(rest, up.work, "first")
    _gpu_function(rest, up.work, "second")

    def called_enough() -> bool:
        for name in ("greets", "first", "second"):
            answer = rest.call(name, "you")
            assert answer.status_code == 200, f"{answer.text}\n{up.said()}"
        rest.http.post("/async-function/greets", content="later")
        assert rest.http.post("/workflow/twice", content="you").status_code == 200
        rest.call("nobody")
        time.sleep(0.3)  # between calls: one stack and one Prometheus share the processors
        return not _missing(watching)

    wait_until(called_enough, "calls leave signs", instead=lambda: f"{_missing(watching)}")
    wait_until(lambda: not leases(up), "every lease has ended")
    wait_until(lambda: len(_residents(up)) > 1, "both models are in GPU memory")
    up.scheduler.post(f"/models/{in_path(_residents(up)[0])}/evict")  # the other one stays
    wait_until(lambda: watching.numbers(_END), "the end is scraped too")


def _residents(up: Stack) -> list[str]:
    gpus = up.scheduler.get("/cluster")["gpus"]
    return sorted({resident["model"] for gpu in gpus for resident in gpu["residents"]})


def _gpu_function(rest: Rest, work: Path, name: str) -> None:
    """A model of its own each."""
    seed = f"torch.manual_seed({len(name)})"
    handler = ON_GPU.replace("torch.manual_seed(0)", seed)
    annotations = {**write(work, name, handler), "com.gpufaas.enabled": "true"}
    rest.deploy(name, annotations=annotations)
