"""`gpufaas gpu-manager --scheduler` against a scheduler in another process, which is killed."""

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from gpu_manager.credentials import FunctionCredentials, FunctionIdentity, load_secret
from gpufaas.local.held_ports import HeldPort
from scheduler.service.http.access import ApiRole, token
from testbed.nodes.worker_client import FunctionClient
from tests.integration.test_node import model
from tests.kit.processes.two_nodes import GPUFAAS, Process
from tests.kit.waiting import wait_until


class Cluster:
    """A scheduler and one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        self.url = f"http://127.0.0.1:{HeldPort().keep()}"
        self.address = f"unix:{folder / 'node.sock'}"
        self.processes: list[Process] = []

    def scheduler(self) -> Process:
        log = self.folder / f"scheduler{len(self.processes)}.log"
        listen = self.url.removeprefix("http://")
        arguments = ("scheduler", "--listen", listen, "--secret-file", str(self.secret))
        return self._keep(Process("answers at", log, *arguments))

    def node(self) -> Process:
        command = ["gpu-manager", "--node", "n0", "--devices", "cpu:1", "--gpu-memory", "400MiB"]
        command += ["--listen", self.address, "--scheduler", self.url]
        command += ["--secret-file", str(self.secret)]
        return self._keep(Process("is attached", self.folder / "node.log", *command))

    def function(self) -> FunctionClient:
        credentials = FunctionCredentials(load_secret(self.secret))
        return FunctionClient(self.address, credentials.issue(FunctionIdentity("team", "reader")))

    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs as the scheduler shows them."""
        bearer = {"authorization": f"Bearer {token(load_secret(self.secret), ApiRole.ADMIN)}"}
        request = urllib.request.Request(f"{self.url}/cluster", headers=bearer)
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            found: list[dict[str, Any]] = json.load(answer)["gpus"]
        return found

    def has_one_gpu(self) -> bool:
        """Whether a scheduler leads, and one GPU is attached to it."""
        try:
            return len(self.gpus()) == 1
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return False

    def _keep(self, process: Process) -> Process:
        self.processes.append(process)
        return process


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    for process in found.processes:
        process.stop()


def test_function_computes_on_when_the_scheduler_is_killed_and_starts_again(
    cluster: Cluster,
) -> None:
    first, node = cluster.scheduler(), cluster.node()
    image = model(31.0)
    it = cluster.function()
    it.upload(image)
    assert it.use(image) == [32.0] * 4
    it.acquire(image)

    first.signalled(signal.SIGKILL)

    assert it.call(image) == [32.0] * 4
    second = cluster.scheduler()
    wait_until(cluster.has_one_gpu, "one GPU is attached")
    it.release()
    assert it.use(image) == [32.0] * 4
    log = (cluster.folder / "node.log").read_text()
    assert log.count(" was loaded on n0/cpu:0 in ") == 1  # it was not loaded again

    assert node.signalled(signal.SIGTERM) == 0
    assert cluster.gpus() == []
    assert "Traceback" not in (cluster.folder / "node.log").read_text()
    assert second.signalled(signal.SIGTERM) == 0
    it.close()
    image.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--scheduler", "ftp://somewhere"), "http://host:port"),
        (("--scheduler", ""), "http://host:port"),
        (("--scheduler", "http://localhost:99999"), "http://host:port"),
        (("--advertise", "nowhere"), "is expected"),
    ],
)
def test_node_does_not_start_when_its_cluster_makes_no_sense(
    tmp_path: Path, options: tuple[str, str], complaint: str
) -> None:
    common = ["--devices", "cpu:1", "--secret-file", str(tmp_path / "secret")]
    run = subprocess.run(
        [*GPUFAAS, "gpu-manager", *common, *options],
        capture_output=True,
        text=True,
        timeout=30.0,
        check=False,
    )
    assert run.returncode == 2
    assert complaint in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
