"""A real node in a thread of this process."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch_shim
from cache_manager.model.ids import MIB
from common.addresses import UnixAddress
from gpu_manager.api import MakeRuntime, NodeSettings
from gpu_manager.devices.gpu_turns import turn_holder
from gpu_manager.runtimes.runtime import MergedSums
from gpufaas.embedded_node import EmbeddedNode, embedded_node
from gpufaas.options.gpu_node import POLICY

_PATIENCE_S = 120.0
T = TypeVar("T")


class NodeThread:
    """A node on an event loop of its own, in a thread; `make_runtime` replaces its workers."""

    def __init__(
        self,
        settings: NodeSettings,
        make_runtime: MakeRuntime | None = None,
        policy: str = POLICY,
    ) -> None:
        self._settings = settings
        self._make_runtime = make_runtime
        self._policy = policy
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="node")
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def address(self) -> str:
        """The first address that the node listens on."""
        return str(self.node.addresses[0])

    def credential(self, function: str = "function", tenant: str = "team") -> str:
        """A credential for a function of a tenant."""
        return self.node.credential(tenant, function)

    def environment(
        self, base: Mapping[str, str], credential: str, tracing: str = "wait"
    ) -> dict[str, str]:
        """The environment of a function that uses the first GPU of this node."""
        device = self.node.manager.devices[0]
        return dict(base) | {
            "PYTHONPATH": str(Path(torch_shim.__file__).parent / "activate"),
            "CUDA_VISIBLE_DEVICES": "",  # a function has no GPU
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": self.address,
            "GPUFAAS_CREDENTIAL": credential,
            "GPUFAAS_GPU_MEMORY": str(device.memory_bytes),
            "GPUFAAS_GPU_NAME": device.name,
            "GPUFAAS_TRACING": tracing,
        }

    def run(self, work: Callable[[EmbeddedNode], T]) -> T:
        """Call a function with the node on the node's own thread."""

        async def there() -> T:
            return work(self.node)

        return self.do(there())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the node's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    def pids(self) -> list[int]:
        """The processes of the loaded models."""

        def found(node: EmbeddedNode) -> list[int]:
            gpus = node.manager.node.gpus.values()
            models = [resident for gpu in gpus for resident in gpu.residents.values()]
            hosts = [model.hosted.host for model in models if model.hosted is not None]
            return [host.pid for host in hosts if host is not None]

        return self.run(found)

    def leases(self) -> int:
        """The number of leases in force."""
        return self.run(lambda node: len(node.manager.node.leases))

    def stop(self) -> None:
        """End the node and its thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            async with embedded_node(self._settings, self._policy, self._make_runtime) as self.node:
                self._ready.set()
                await self._stopping.wait()
        except BaseException as error:
            if self._ready.is_set():
                raise
            self._failure = error  # raised to the thread that makes this object
            self._ready.set()


@contextmanager
def node_thread(gpu_mib: int = 512, *, policy: str = POLICY, **more: Any) -> Iterator[NodeThread]:
    """A node with one emulated GPU, on an abstract socket."""
    listen = (UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"),)
    values: dict[str, Any] = {
        "listen": listen,
        "devices": "cpu:1",
        "gpu_memory_bytes": gpu_mib * MIB,
        "drain_s": 0.5,
    }
    node = NodeThread(NodeSettings("node", **(values | more)), policy=policy)
    try:
        yield node
    finally:
        node.stop()


def merges(node: EmbeddedNode) -> MergedSums:
    """What became of the calls of all models."""
    found = MergedSums()
    for gpu in node.manager.node.gpus.values():
        for resident in gpu.residents.values():
            found = found.plus(resident.merges)
    return found


def holder_of_first_slot(node: EmbeddedNode) -> int | None:
    """The process that runs on the first slot."""
    (gpu,) = node.manager.node.gpus.values()
    assert gpu.turns is not None
    return turn_holder(gpu.turns, 0)
