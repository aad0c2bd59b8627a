"""A node with worker processes in a thread of this process, on an emulated or a real GPU."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from bench.measure.function_process import Environment
from bench.measure.process_usage import processor_s
from bench.measure.report import MeasurementFailed
from cache_manager.model.ids import ModelId
from common.addresses import UnixAddress
from common.telemetry.metrics import Values
from gpu_manager import metrics
from gpu_manager.api import NodeSettings
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.node.leases import LeaseTimes
from gpu_manager.runtimes.process import ProcessRuntime
from gpu_manager.runtimes.runtime import HostedModel, LoadSpan, Observer, Runtime
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.node_thread import NodeThread

_PATIENCE_S = 60.0
_STEADY_S, _STEADY_EMULATED_S, _STEADY_WITHIN_S = 1.0, 0.3, 25.0
_QUIET_S = 0.1  # of processor time while a worker rests: CUDA's own threads look around
_TENANT = "bench"


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A model on a GPU, as the manager knows it."""

    model: ModelId
    memory_bytes: int
    load_s: float  # by the worker's clock
    load_spans: tuple[LoadSpan, ...]  # the phases of its load
    pid: int


@dataclass(frozen=True, slots=True)
class SparesLook:
    """The workers that wait for a model: what each has of the GPU, and what all have computed.

    The bytes are None where the driver knows the process by another number.
    """

    taken_bytes: Mapping[int, int | None]
    computed_s: float

    def is_quiet_since(self, before: "SparesLook") -> bool:
        """Whether they have hardly computed, and have taken nothing."""
        return (
            self.taken_bytes == before.taken_bytes
            and self.computed_s - before.computed_s < _QUIET_S
        )


class WorkerNode:
    """A node whose pool of workers can be waited for."""

    def __init__(self, settings: NodeSettings) -> None:
        self._thread = NodeThread(settings, self._make_runtime)

    @property
    def _node(self) -> EmbeddedNode:
        return self._thread.node

    def environment(self, base: Environment, function: str, tracing: str) -> dict[str, str]:
        """The environment of a function that uses this node."""
        credential = self._node.credential(_TENANT, function)
        return self._thread.environment(base, credential, tracing)

    def on_gpus(self) -> list[OnGpu]:
        """The models that are loaded."""
        return self._thread.run(_on_gpus)

    def memory_bytes(self) -> int:
        """The bytes of the first GPU that may be used."""
        return self._node.manager.devices[0].memory_bytes

    def process_bytes(self) -> Mapping[int, int]:
        """The bytes of the first GPU that each process takes, where the driver reports them."""
        return self._node.manager.devices[0].process_bytes()

    def load_phases_s(self) -> dict[str, float]:
        """The seconds that all loads so far have spent in each of their stages."""

        def found(node: EmbeddedNode) -> dict[str, float]:
            counters = list(node.manager.node.meters.families())
            (phases,) = (each for each in counters if each.metric is metrics.LOAD_PHASES)
            assert isinstance(phases, Values)
            return {phase: spent_s for (phase,), spent_s in phases.values.items()}

        return self._thread.run(found)

    def evictions(self) -> int:
        """The number of models evicted so far."""
        return self._node.status().counts.evictions

    def evict_all(self) -> None:
        """Evict every model, and wait until a worker is ready for the next one."""
        self._until(lambda: not self._thread.leases(), "leases do not end")
        for found in self.on_gpus():
            self._thread.do(self._node.driver.evict(found.model))
        self._until(lambda: not self.on_gpus(), "models do not leave")
        self.wait_for_worker()

    def wait_for_worker(self) -> None:
        """Wait until a worker is ready in the pool and the node has nothing else to do.

        A worker is in the pool from the order on that has it make its context, which takes
        seconds on a real GPU: it is ready once it computes nothing, and takes no more memory.
        """
        self._until(lambda: all(self._runtime.spares.values()), "no worker is ready")
        if self._node.manager.devices[0].kind == "cpu":
            time.sleep(_STEADY_EMULATED_S)
            return
        mark, since_s = self._look(), time.monotonic()

        def is_steady() -> bool:
            nonlocal mark, since_s
            look = self._look()
            if not look.is_quiet_since(mark):
                mark, since_s = look, time.monotonic()
            return bool(look.taken_bytes) and time.monotonic() - since_s > _STEADY_S

        try:
            self._until(is_steady, "workers do not come to rest", _STEADY_WITHIN_S)
        except MeasurementFailed as error:
            raise MeasurementFailed(f"{error}: {self._look()}") from error

    def _look(self) -> "SparesLook":
        device = self._node.manager.devices[0]
        taken_bytes = device.process_bytes()
        pids = [worker.pid for worker in self._runtime.spare_workers(device.worker_device)]
        computed_s = 0.0
        for pid in pids:
            with suppress(OSError):  # it has ended, and the pool makes another one
                computed_s += processor_s(pid)
        return SparesLook({pid: taken_bytes.get(pid) for pid in pids}, computed_s)

    def stop(self) -> None:
        """End the node."""
        self._thread.stop()

    def _until(
        self, true: Callable[[], bool], otherwise: str, within_s: float = _PATIENCE_S
    ) -> None:
        deadline_s = time.monotonic() + within_s
        while not true():
            if time.monotonic() > deadline_s:
                raise MeasurementFailed(f"{otherwise} within {within_s:g} s")
            time.sleep(0.02)

    async def _make_runtime(self, observer: Observer, devices: Sequence[GpuDevice]) -> Runtime:
        self._runtime = ProcessRuntime(observer, [device.worker_device for device in devices])
        return self._runtime


def _on_gpus(node: EmbeddedNode) -> list[OnGpu]:
    gpus = node.manager.node.gpus.values()
    residents = [resident for gpu in gpus for resident in gpu.residents.values()]
    return [
        OnGpu(
            ModelId(hosted.order.model),
            hosted.memory_bytes,
            hosted.load_s,
            resident.load_spans,
            _pid_of(hosted),
        )
        for resident in residents
        if (hosted := resident.hosted) is not None
    ]


def _pid_of(hosted: HostedModel) -> int:
    assert hosted.host is not None, "the process runtime names every model's process"
    return hosted.host.pid


@contextmanager
def worker_node(
    devices: str = "cpu:1",
    gpu_memory_bytes: int | None = None,
    linger_s: float | None = None,
    store_memory_bytes: int | None = None,
) -> Iterator[WorkerNode]:
    """A node that listens on an abstract socket, with a worker in its pool."""
    times = LeaseTimes() if linger_s is None else LeaseTimes(linger_s=linger_s)
    listen = (UnixAddress(f"@gpufaas-bench-{secrets.token_hex(8)}"),)
    made = WorkerNode(
        NodeSettings(
            "bench",
            listen,
            devices=devices,
            gpu_memory_bytes=gpu_memory_bytes,
            leases=times,
            drain_s=0.5,
            store_memory_bytes=store_memory_bytes,
        )
    )
    try:
        made.wait_for_worker()
        yield made
    finally:
        made.stop()
