"""What tells a GPU manager that a function comes: it neither waits nor fails."""

import socket
import time
from pathlib import Path

import pytest

from gateway_ext.api import FunctionId
from gpu_manager.credentials import ADMINISTRATOR
from gpufaas.commands.gateway import ShimEnvironment
from gpufaas.remote import manager_api
from gpufaas.remote.scheduler_api import SchedulerApi
from gpufaas.stack.held_ports import HeldPort
from tests.kit.nodes.manager_client import manager
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

_MANY, _IN_VAIN_S = 1_000, 60.0  # a pause of a tenth of a second each would take longer


async def test_manager_prepares_when_a_function_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    async with manager(prepare_at_start=False, secret_file=secret) as it:
        scheduler = SchedulerApi((f"http://127.0.0.1:{HeldPort().keep()}",), "token")
        shim = ShimEnvironment(it.address, secret.read_bytes(), scheduler)
        assert it.runtime.prepared == 0

        for _ in range(3):
            shim.environment(FunctionId("openfaas-fn", "f"))

        await eventually(lambda: it.runtime.prepared == 1, "it is prepared")
        assert (await it.client()).welcome["node"] == "node"
        assert not caplog.records


async def test_manager_does_nothing_when_the_announcement_is_forged() -> None:
    async with manager(prepare_at_start=False) as it:
        manager_api.announce_start(it.address, "openfaas-fn/f:" + "0" * 64)
        administrator = await it.stranger()  # who is served after the forger
        await administrator.hello(it.node.manager.credentials.issue(ADMINISTRATOR), role="admin")
        assert it.runtime.prepared == 0


def test_announcement_is_dropped_at_once_when_the_manager_is_away_or_does_not_accept(
    tmp_path: Path,
) -> None:
    path = tmp_path / "node.sock"
    began_s = time.monotonic()
    manager_api.announce_start(f"unix:{path}", "credential")
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(path))
        manager_api.announce_start(f"unix:{path}", "credential")
        frozen.listen(0)
        for _ in range(_MANY):
            manager_api.announce_start(f"unix:{path}", "credential")
    assert time.monotonic() - began_s < _IN_VAIN_S


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:{port}", "tls:127.0.0.1:{port}"])
def test_manager_elsewhere_is_not_dialled(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        manager_api.announce_start(address.format(port=server.getsockname()[1]), "credential")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
