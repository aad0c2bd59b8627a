"""A GPU manager of a cluster, with a runtime without processes, and functions that talk to it."""

import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cache_manager.model.ids import MIB, ModelId
from common.addresses import UnixAddress
from gpu_manager.api import FunctionIdentity, GpuManager, NodeSettings
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.node.leases import LeaseTimes
from gpu_manager.node.tenant_models import model_id
from gpu_manager.runtimes.runtime import Observer, Runtime
from gpufaas.commands.gpu_manager import cluster_node
from tests.kit.nodes.in_memory_runtime import InMemoryRuntime
from tests.kit.nodes.manager_client import ManagerClient, SealedWeights
from tests.kit.worlds.cluster_in_process import SECRET, TIMES, a_scheduler

# Leases that do not run out while a busy machine holds this process up.
PATIENT = LeaseTimes(linger_s=60.0, first_call_s=60.0, claim_s=60.0)
GRACE_S = 120.0  # of a node whose stream broke
_STREAMS = replace(TIMES, silence_s=60.0, greeting_s=60.0, grace_s=GRACE_S)


@dataclass
class Joined:
    """One node of a cluster."""

    manager: GpuManager
    attachment: Attachment
    runtime: InMemoryRuntime
    _clients: list[ManagerClient] = field(default_factory=list)

    async def client(self, function: str = "function", session: str = "") -> ManagerClient:
        """A connection of this function."""
        client = await ManagerClient.open(str(self.manager.addresses[0]))
        self._clients.append(client)
        await client.hello(
            self.manager.credentials.issue(FunctionIdentity("team", function)), session
        )
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


def model_of(image: SealedWeights) -> ModelId:
    """What the scheduler calls the image, for the functions of these tests."""
    return model_id("team", image.digest)


@asynccontextmanager
async def joined(
    folder: Path, *urls: str, name: str = "n0", gpu_mib: int = 1024, **more: Any
) -> AsyncIterator[Joined]:
    """A node of this name, which looks for its scheduler at these URLs."""
    runtimes: list[InMemoryRuntime] = []

    async def make(observer: Observer, _devices: Sequence[GpuDevice]) -> Runtime:
        runtimes.append(InMemoryRuntime(observer))
        runtimes[0].load_s = runtimes[0].unload_s = 0.0
        return runtimes[0]

    secret_file = folder / "secret"
    secret_file.touch(mode=0o600)
    secret_file.write_bytes(SECRET)
    listen = (UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"),)
    values: dict[str, Any] = {"devices": "cpu:1", "gpu_memory_bytes": gpu_mib * MIB}
    values |= {"drain_s": 0.5, "secret_file": secret_file}
    settings = NodeSettings(name, listen, **(values | more))
    async with cluster_node(settings, urls, SECRET, make, TIMES) as (manager, attachment):
        found = Joined(manager, attachment, runtimes[0])
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def patient_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams between manager and scheduler that only a test breaks.

    A break of a moment refuses questions, and moves leases.
    """
    defaults = a_scheduler.__kwdefaults__
    assert defaults is not None
    monkeypatch.setattr(sys.modules[__name__], "TIMES", _STREAMS)
    monkeypatch.setitem(defaults, "times", _STREAMS)
