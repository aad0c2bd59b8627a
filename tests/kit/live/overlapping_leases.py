"""Real workers on one emulated GPU whose slot holds one lease or several: what overlap gives."""

import struct
import threading
import time
from dataclasses import dataclass

from gpu_manager.node.settings import EmulatedTimes
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import (
    FunctionClient,
)

# A function's own work before its GPU work, and that.
BEFORE_S, RUN_S = 0.040, 0.010
_MODELS, _GPU_MIB = 5, 8192


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Requests a second, and the number of answered requests of each caller."""

    rate: float
    served: list[int]


def overlapped(leases: int, callers: int, within_s: float) -> Overlapped:
    """Callers that acquire a lease, work without the GPU, call and release, again and again.

    They share five models, each of which has a worker of its own, all on one GPU.
    """
    images = [weights(struct.pack("4f", *[float(n)] * 4)) for n in range(_MODELS)]
    emulation = EmulatedTimes(run_s=RUN_S)
    with node_thread(_GPU_MIB, gpu_overlap=leases, emulation=emulation) as node:
        _load(node, images)
        found = [LeaseHolder(node, images[number % _MODELS]) for number in range(callers)]
        begun_s = time.perf_counter()
        for caller in found:
            caller.serve_until(begun_s + within_s)
        served = [caller.ended() for caller in found]
        spent_s = time.perf_counter() - begun_s
    for image in images:
        image.close()
    return Overlapped(sum(served) / spent_s, served)


class LeaseHolder:
    """One thread of a function process: one request at a time, each under a new lease."""

    def __init__(self, node: NodeThread, image: SealedWeights) -> None:
        self._function = FunctionClient(node.address, node.credential())
        self._function.upload(image)
        self._image = image
        self._served = 0
        self._failure: BaseException | None = None

    def serve_until(self, end_s: float) -> None:
        """Start the thread, which serves until this time."""
        self._thread = threading.Thread(target=self._serve, args=(end_s,))
        self._thread.start()

    def ended(self) -> int:
        """Wait for the end; how many requests were answered."""
        self._thread.join()
        self._function.close()
        if self._failure is not None:
            raise self._failure
        return self._served

    def _serve(self, end_s: float) -> None:
        try:
            while time.perf_counter() < end_s:
                self._function.acquire(self._image)
                time.sleep(BEFORE_S)
                self._function.call(self._image)
                self._function.release()
                self._served += 1
        except BaseException as error:
            self._failure = error
            raise


def _load(node: NodeThread, images: list[SealedWeights]) -> None:
    """Have every model on the GPU."""
    function = FunctionClient(node.address, node.credential())
    for image in images:
        function.upload(image)
        function.use(image)
        function.release()
    function.close()
