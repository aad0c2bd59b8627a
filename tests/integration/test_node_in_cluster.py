"""`gpufaas gpu-manager --scheduler` against a scheduler in another process, which is killed."""

import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.kit.nodes.manager_client import model
from tests.kit.processes.daemons import GPUFAAS
from tests.kit.processes.two_nodes import TwoNodes
from tests.kit.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.group("node", seconds=130)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TwoNodes]:
    with TwoNodes(tmp_path) as found:
        yield found


def has_one_gpu(cluster: TwoNodes) -> bool:
    """Whether a scheduler leads, and one GPU is attached to it."""
    try:
        return len(cluster.gpus()) == 1
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return False


def test_function_computes_on_when_the_scheduler_is_killed_and_starts_again(
    cluster: TwoNodes,
) -> None:
    address = f"unix:{cluster.folder / 'node.sock'}"
    first, node = cluster.scheduler(), cluster.node("n0", address)
    image = model(31.0)
    it = cluster.function(address)
    it.upload(image)
    assert it.use(image) == [32.0] * 4
    it.acquire(image)

    first.kill()

    assert it.call(image) == [32.0] * 4
    second = cluster.scheduler()
    wait_until(lambda: has_one_gpu(cluster), "one GPU is attached")
    it.release()
    assert it.use(image) == [32.0] * 4
    assert node.said().count(" was loaded on n0/cpu:0 in ") == 1  # it was not loaded again

    node.tell(signal.SIGTERM)
    assert node.ended(PATIENCE_S) == 0
    wait_until(lambda: cluster.gpus() == {}, "the scheduler has no GPU")
    assert "Traceback" not in node.said()
    second.tell(signal.SIGTERM)
    assert second.ended(PATIENCE_S) == 0
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
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 2
    assert complaint in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
