"""A node that starts and stops: what it leaves behind, and how a signal ends a daemon."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpu_manager.credentials import FunctionCredentials, FunctionIdentity, load_secret
from tests.kit.nodes.manager_client import model
from tests.kit.nodes.node_thread import node_thread
from tests.kit.nodes.worker_client import FunctionClient, alive
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import PATIENCE_S, wait_until
from torch_shim.errors import WireError

pytestmark = pytest.mark.group("node", seconds=130)

GPUFAAS = [sys.executable, "-m", "gpufaas"]
HOST = socket.gethostname()


def test_nothing_is_left_when_a_node_has_stopped() -> None:
    before = open_files()
    with node_thread(400) as it:
        image = model(15.0)
        function = FunctionClient(it.address, it.credential())
        function.upload(image)
        assert function.use(image) == [16.0] * 4
        pids = it.pids()
        server = _fork_server(pids[0])
    function.close()
    image.close()

    assert not any(alive(pid) for pid in [*pids, server])
    wait_until(
        lambda: not opened_since(before),
        "no file more is open",
        instead=lambda: str(opened_since(before)),
    )


def _fork_server(pid: int) -> int:
    """A worker's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


class Daemon:
    """`gpufaas gpu-manager` in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.address = f"unix:{folder / 'run' / 'node.sock'}"
        self.secret = folder / "secret"
        command = [*GPUFAAS, "gpu-manager", "--devices", "cpu:1", "--gpu-memory", "400MiB"]
        command += ["--listen", self.address, "--secret-file", str(self.secret), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if " with " in line:
                break
        else:
            pytest.fail("it did not start")

    def function(self) -> FunctionClient:
        credentials = FunctionCredentials(load_secret(self.secret))
        return FunctionClient(self.address, credentials.issue(FunctionIdentity("team", "reader")))

    def family(self) -> list[int]:
        """Its fork server and the workers."""
        children = _children(self.process.pid)
        return children + [grandchild for child in children for grandchild in _children(child)]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=PATIENCE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path)
    yield found
    found.stop()


def gpufaas(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GPUFAAS, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_workers_and_memory_are_gone_when_the_daemon_was_killed(daemon: Daemon) -> None:
    image = model(21.0, 30)
    it = daemon.function()
    it.upload(image)
    assert it.use(image) == [22.0] * 4
    family = daemon.family()
    assert len(family) >= 2

    daemon.process.kill()

    wait_until(lambda: not any(alive(pid) for pid in family), "all have ended")
    with pytest.raises(WireError):
        it.call(image)
    it.close()
    image.close()


def test_daemon_starts_again_when_a_killed_one_left_its_socket(tmp_path: Path) -> None:
    first = Daemon(tmp_path)
    first.process.kill()
    first.stop()
    assert (tmp_path / "run" / "node.sock").is_socket()

    second = Daemon(tmp_path)

    second.function().close()
    second.stop()


def test_call_in_flight_ends_when_the_daemon_is_told_to_stop(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "--emulate-run", "3.0")
    image = model(22.0)
    it = daemon.function()
    it.upload(image)
    it.acquire(image)
    family = daemon.family()
    with ThreadPoolExecutor(1) as beside:
        call = beside.submit(it.call, image)
        time.sleep(1.5)  # it is on its way by then; once it is told to stop, it has 5 s more
        daemon.process.terminate()

        assert call.result() == [23.0] * 4

    assert daemon.process.wait(timeout=PATIENCE_S) == 0
    assert not any(alive(pid) for pid in family)
    assert list((tmp_path / "run").iterdir()) == []
    it.close()
    image.close()
    daemon.stop()


def test_second_daemon_says_so_when_another_one_listens_there(daemon: Daemon) -> None:
    second = gpufaas("gpu-manager", "--devices", "cpu:1", "--listen", daemon.address)

    assert second.returncode == 2
    assert second.stderr.splitlines()[-1] == (
        f"gpufaas gpu-manager: another GPU manager listens at {daemon.address}"
    )
    daemon.function().close()


def test_people_see_pin_and_evict_models(daemon: Daemon) -> None:
    image = model(23.0)
    it = daemon.function()
    it.upload(image)
    begun_s = time.time()
    it.use(image)
    used_s = time.time()
    it.close()
    name = f"team/{image.digest[:20]}"

    wait_until(lambda: shown(daemon)["uses"], "its use is reported")
    row = shown(daemon)
    assert (row["model"], row["label"], row["gpu"]) == (name, "reader", f"{HOST}/cpu:0")
    assert row["uses"] == 1
    assert begun_s - 10.0 < row["since"] < used_s + 10.0
    table = gpufaas("models", "--address", daemon.address).stdout
    assert table.splitlines()[1].split()[:3] == [name, "reader", f"{HOST}/cpu:0"]

    assert gpufaas("pin", "reader", "--address", daemon.address).stdout == f"pin: {name}\n"
    refused = gpufaas("evict", "reader", "--address", daemon.address)
    assert refused.returncode == 2
    assert "pinned" in refused.stderr
    gpufaas("unpin", "reader", "--address", daemon.address)
    assert gpufaas("evict", "reader", "--address", daemon.address).returncode == 0
    row = shown(daemon)
    assert (row["gpu"], row["tier"]) == (None, "host")
    image.close()


def shown(daemon: Daemon) -> dict[str, Any]:
    """What is said of the only model that it knows."""
    (row,) = json.loads(gpufaas("models", "--address", daemon.address, "--json").stdout)
    found: dict[str, Any] = row
    return found


def test_weights_are_found_on_disk_when_the_store_is_too_small(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    daemon = Daemon(tmp_path, "--store-memory", "30MiB", "--spill", str(spill))
    one, other = model(24.0, 20), model(25.0, 21)
    it = daemon.function()
    for image, answer in ((one, 25.0), (other, 26.0)):
        it.upload(image)
        assert it.use(image) == [answer] * 4
        it.release()
    gpufaas("evict", one.digest, "--address", daemon.address)
    wait_until(lambda: len(list(spill.glob("*.safetensors"))) >= 1, "an image is on disk")

    assert it.use(one) == [25.0] * 4

    it.close()
    for image in (one, other):
        image.close()
    daemon.stop()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--devices", "gpu"), "devices 'gpu'"),
        (("--devices", "cpu:0"), "devices 'cpu:0'"),
        (("--gpu-memory", "lots"), "not a size"),
        (("--listen", "nowhere"), "is expected"),
        (("--policy", "magic"), "unknown policy"),
        (("--emulate-load", "slow"), "emulated load"),
        (("--emulate-disk", "fast"), "emulated disk"),
        (("--secret-file", "/proc/none/secret"), "secret file"),
    ],
)
def test_daemon_does_not_start_when_an_option_makes_no_sense(
    options: tuple[str, str], complaint: str
) -> None:
    run = gpufaas("gpu-manager", *options)

    assert run.returncode == 2
    assert run.stdout == ""
    assert complaint in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr


def test_models_say_what_to_do_when_no_manager_answers(tmp_path: Path) -> None:
    run = gpufaas("models", "--address", f"unix:{tmp_path / 'none'}")

    assert run.returncode == 2
    assert run.stderr.startswith("gpufaas models: no GPU manager answers at")


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]
