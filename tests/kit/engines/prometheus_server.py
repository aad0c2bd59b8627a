"""A Prometheus that watches a stack, and a GPU as NVML would show it: what monitoring tests ask."""

import asyncio
import contextlib
import math
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from cache_manager.model.ids import GpuId, NodeId
from common.telemetry.metrics import page
from gpu_manager.cuda import nvidia_gpu
from gpu_manager.node.counts import NodeMeters, of_gpus
from gpu_manager.node.ledger import Account, Ledger
from gpu_manager.node.residents import HostGpu
from gpu_manager.server.exporter import Exporter
from gpufaas.stack.held_ports import HeldPort
from scheduler.api import GpuSpec
from tests.kit import needs
from tests.kit.fakes.fake_nvml import GIB, FakeGpu, FakeNvml
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

DEPLOY = ROOT / "deploy" / "prometheus"
_EVERY = "1s"


@dataclass(frozen=True)
class Prometheus:
    """One that runs; `ask` answers as its API does."""

    url: str

    def ask(self, path: str, **query: str) -> Any:
        found = httpx.get(f"{self.url}/api/v1/{path}", params=query, timeout=30.0)
        said = found.json()
        assert said["status"] == "success", f"{query}: {said}"
        return said["data"]

    def values(self, expr: str) -> list[tuple[Mapping[str, str], float]]:
        """What an expression gives now; a scalar is one without labels."""
        data = self.ask("query", query=expr)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def numbers(self, expr: str) -> list[float]:
        """Those that are numbers."""
        return [value for _, value in self.values(expr) if not math.isnan(value)]


@contextlib.contextmanager
def prometheus(folder: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """One with our rules, which asks these targets by job every second."""
    program = needs.command("prometheus", "prometheus")
    config = {
        "global": {"scrape_interval": _EVERY, "evaluation_interval": _EVERY},
        "rule_files": [str(DEPLOY / "rules" / "*.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{HeldPort().keep()}"
    log = folder / "prometheus.log"
    command = [
        str(program),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: _ready(f"http://{address}"), "Prometheus answers", instead=log.read_text)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def nvml_node() -> Iterator[str]:
    """The metrics of a node with one NVIDIA GPU, as a stand-in for NVML shows it; its address."""
    nvml = FakeNvml(FakeGpu("GPU-0", used_bytes=9 * GIB))
    (device,) = nvidia_gpu.find(NodeId("fake"), nvml)
    ledger = Ledger(device.memory_bytes, 0)
    ledger.grow(Account(), 8 * GIB)
    gpu = HostGpu(device, GpuSpec(GpuId(device.id), NodeId("fake"), device.memory_bytes), ledger)
    meters = NodeMeters([gpu.id])

    def text() -> bytes:
        return page([*meters.families(), *of_gpus([gpu])])

    with _running(Exporter(text, str)) as (host, port):
        yield f"{host}:{port}"


@contextlib.contextmanager
def _running(exporter: Exporter) -> Iterator[tuple[str, int]]:
    """In a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(exporter.start("127.0.0.1", 0), loop).result(10)
        yield exporter.address
        asyncio.run_coroutine_threadsafe(exporter.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
