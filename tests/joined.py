"""A GPU manager of a cluster, with a runtime without processes, and functions that talk to it."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache_manager.model import MIB, ModelId
from gpu_manager.api import GpuManager, Identity, NodeSettings, UnixAddress
from gpu_manager.attachment import Attachment
from gpu_manager.catalogue import model_id
from gpu_manager.devices.base import Device
from gpu_manager.runtime import Observer, Runtime
from gpufaas.joined import joined_node
from tests.cluster import SECRET, TIMES
from tests.in_memory_runtime import InMemoryRuntime
from tests.manager_client import Client, Weights


@dataclass
class Joined:
    """One node of a cluster."""

    manager: GpuManager
    attachment: Attachment
    runtime: InMemoryRuntime
    _clients: list[Client] = field(default_factory=list)

    async def client(self, function: str = "function", session: str = "") -> Client:
        """A connection of this function."""
        client = await Client.open(str(self.manager.addresses[0]))
        self._clients.append(client)
        await client.hello(self.manager.credentials.issue(Identity("team", function)), session)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


def model_of(image: Weights) -> ModelId:
    """What the scheduler calls the image, for the functions of these tests."""
    return model_id("team", image.digest)


@asynccontextmanager
async def joined(
    folder: Path, *urls: str, name: str = "n0", gpu_mib: int = 1024, **more: Any
) -> AsyncIterator[Joined]:
    """A node of this name, which looks for its scheduler at these URLs."""
    runtimes: list[InMemoryRuntime] = []

    async def make(observer: Observer, _devices: Sequence[Device]) -> Runtime:
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
    async with joined_node(settings, urls, SECRET, make, TIMES) as (manager, attachment):
        found = Joined(manager, attachment, runtimes[0])
        try:
            yield found
        finally:
            found.close()
