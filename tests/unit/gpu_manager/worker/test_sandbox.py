"""What a worker has given up, seen from outside."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_manager.runtimes.process import ProcessRuntime
from gpu_manager.runtimes.runtime import HostedModel, LoadOrder, Observer
from tests.kit.worlds.caller import DIGEST, sealed_image
from tests.kit.worlds.worker_machine import pid_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")


async def _loaded(tenants: list[str], look: Any) -> None:
    """Load a model for each tenant and look at the workers."""

    image, table, total = sealed_image(torch.ones(16))
    runtime = ProcessRuntime(Observer(), ["cpu"])
    runtime.prepare()
    try:
        workers: list[HostedModel] = []
        for tenant in tenants:
            order = LoadOrder(
                "m", tenant, "g", "cpu", DIGEST, table, total, image, limit_bytes=1 << 30
            )
            workers.append(await runtime.load(order))
        look(workers)
    finally:
        await runtime.close()
        os.close(image)


def _status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


async def test_worker_has_no_rights_when_it_belongs_to_a_tenant() -> None:
    def look(workers: list[HostedModel]) -> None:
        one, again, other = (_status(pid_of(worker)) for worker in workers)
        assert one["Uid"] == again["Uid"] != other["Uid"]
        for status in (one, again, other):
            assert len(set(status["Uid"] + status["Gid"])) == 1
            assert status["Uid"][0] != "0"
            assert status["Groups"] == []
            assert status["CapEff"] == status["CapPrm"] == ["0000000000000000"]
            assert status["NoNewPrivs"] == ["1"]
        limits = Path(f"/proc/{pid_of(workers[0])}/limits").read_text()
        assert limits.splitlines()[5].split()[4:6] == ["0", "0"]  # core file size
        # Undumpable: what describes the process belongs to root, not to the tenant's user.
        assert Path(f"/proc/{pid_of(workers[0])}/mem").stat().st_uid == 0

    await _loaded(["one", "one", "other"], look)


async def test_worker_has_no_network_when_the_system_allows_it() -> None:
    def look(workers: list[HostedModel]) -> None:
        here = Path("/proc/self/ns/net").readlink()
        there = Path(f"/proc/{pid_of(workers[0])}/ns/net").readlink()
        assert here != there
        interfaces = Path(f"/proc/{pid_of(workers[0])}/net/dev").read_text().splitlines()[2:]
        assert [line.partition(":")[0].strip() for line in interfaces] == ["lo"]
        routes = Path(f"/proc/{pid_of(workers[0])}/net/route").read_text().splitlines()[1:]
        assert routes == []

    assert socket.if_nameindex()
    await _loaded(["one"], look)
