"""Calls with inputs of one size on a real node, alone and while another function's model loads."""

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.transfers.path_processes import Tail
from cache_manager.model.ids import MIB, ModelId
from gpu_manager.node.settings import EmulatedTimes
from scheduler.model.errors import EventRefused
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient

_PATIENCE_S = 10.0


class CallsOnNode:
    """A node with one GPU, of which two requests have leases at a time: a caller, and a load."""

    def __init__(self, node: NodeThread, load_bytes: int) -> None:
        self._node = node
        self._small = _model(1.0, MIB)
        self._large = _model(2.0, load_bytes)
        self._caller = self._client("small", self._small)
        self._loader = self._client("large", self._large)
        self._caller.acquire(self._small)

    def close(self) -> None:
        """End the clients."""
        for client in (self._caller, self._loader):
            client.close()
        for image in (self._small, self._large):
            image.close()

    def alone(self, size_bytes: int, times: int) -> Tail:
        """Seconds of the transfers of so many calls."""
        return Tail(tuple(self._call(size_bytes) for _ in range(times)))

    def beside_loads(self, size_bytes: int, times: int) -> tuple[Tail, int]:
        """The same, of calls all of which were answered before a load's end; and the loads."""
        found: list[float] = []
        loads = 0
        while len(found) < times:
            loads += 1
            loading = threading.Thread(target=self._load_once)
            loading.start()
            self._call(size_bytes)  # the load may not have begun
            while loading.is_alive():
                seconds = self._call(size_bytes)
                if loading.is_alive():
                    found.append(seconds)
            loading.join()
            self._unload()
        return Tail(tuple(found)), loads

    def _call(self, size_bytes: int) -> float:
        results, seconds = self._caller.feed(self._small, size_bytes)
        assert results == [2.0] * 4, "a wrong number"
        return seconds

    def _load_once(self) -> None:
        self._loader.acquire(self._large)
        assert self._loader.call(self._large) == [3.0] * 4, "a wrong number"
        self._loader.release()

    def _unload(self) -> None:
        gpus = self._node.run(lambda it: it.status().gpus)
        for resident in [each for gpu in gpus for each in gpu.residents]:
            if resident.model.endswith(self._large.digest[:20]):
                self._evict(resident.model)

    def _evict(self, model: ModelId) -> None:
        """Evict the model when its lease, which was released, has ended."""
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._node.do(self._node.node.driver.evict(model))
            except EventRefused:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.01)
            else:
                return

    def _client(self, function: str, image: SealedWeights) -> FunctionClient:
        found = FunctionClient(self._node.address, self._node.credential(function))
        found.upload(image)
        return found


@contextmanager
def calls_on_node(bytes_per_s: float, load_bytes: int) -> Iterator[CallsOnNode]:
    """A node whose PCIe moves so many bytes a second in each direction."""
    emulation = EmulatedTimes(pcie_bytes_per_s=bytes_per_s, pcie_per_gpu=True)
    with node_thread(4096, gpu_overlap=2, emulation=emulation) as node:
        found = CallsOnNode(node, load_bytes)
        try:
            yield found
        finally:
            found.close()


def _model(first: float, size_bytes: int) -> SealedWeights:
    return weights(struct.pack("4f", *[first] * 4) + bytes(size_bytes - 16))
