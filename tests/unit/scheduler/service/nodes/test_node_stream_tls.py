"""Node streams to schedulers behind https URLs."""

from pathlib import Path

import pytest

from tests.kit.cores.builders import request
from tests.kit.network.certificates import self_signed
from tests.kit.network.tls_door import encrypted
from tests.kit.waiting import eventually
from tests.kit.worlds.cluster_in_process import a_node, leases_of
from tests.unit.scheduler.service.nodes.steady_streams import a_steady_scheduler, steadily_attached

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_node_attaches_over_tls_where_its_machine_trusts_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    it, node = await a_steady_scheduler(), a_node()
    async with (
        encrypted(it.url, certificate, key) as url,
        steadily_attached(node, url) as attachment,
    ):
        placement = await attachment.acquire(request("r1"))
        assert leases_of(it) == set(node.leases) == {placement.lease}
    assert it.nodes == {}, "it could say that it leaves"
    await it.stop()


async def test_node_does_not_attach_where_nobody_trusts_the_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = self_signed(tmp_path, "localhost")
    it = await a_steady_scheduler()
    async with (
        encrypted(it.url, certificate, key) as url,
        steadily_attached(a_node(), url) as attachment,
    ):
        await eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
        assert not attachment.connected
    assert it.nodes == {}
    await it.stop()
