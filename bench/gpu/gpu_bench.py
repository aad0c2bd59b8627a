"""What the parts of `make gpu` share: their options, the node, and the functions under measure.

On an emulated GPU the parts show that they work; their figures mean nothing.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.results_file import Row
from bench.measure.function_process import FunctionProcess, function_process
from bench.measure.report import MeasurementFailed
from bench.measure.worker_node import WorkerNode, worker_node

_EMULATED_BYTES = 4 << 30
# The host memory for weights: a GPU machine may have little that is free at first, and more later.
STORE_BYTES = 48 << 30
_LINGER_S = 0.05  # a lease ends soon after its call, so that its model can be evicted


class SharedNode:
    """A node that is started when a part first asks for it, and handed on to the next part."""

    def __init__(self, devices: str, gpu_memory_bytes: int | None = None) -> None:
        self._devices = devices
        self.emulated = devices.startswith("cpu")
        self._gpu_memory_bytes = gpu_memory_bytes
        self._running: WorkerNode | None = None
        self._stack = ExitStack()

    def ready(self) -> WorkerNode:
        """The node, with no model on its GPU; MeasurementFailed where it has no such GPU."""
        if self._running is not None:
            try:
                self._running.evict_all()
            except MeasurementFailed as error:
                print(f"the node of the part before is of no use: {error}", flush=True)
                self.close()
            else:
                return self._running
        size = self._gpu_memory_bytes or (_EMULATED_BYTES if self.emulated else None)
        self._running = self._stack.enter_context(
            worker_node(
                self._devices,
                size,
                _LINGER_S,
                store_memory_bytes=None if self.emulated else STORE_BYTES,
            )
        )
        return self._running

    def close(self) -> None:
        """End the node; the next part has another one."""
        self._running = None
        self._stack.close()


@dataclass(frozen=True, slots=True)
class PartOptions:
    """What a part is told; it should begin nothing new after `deadline_s` of the steady clock."""

    devices: str
    gpu_type: str
    output: Path
    deadline_s: float
    environment: Mapping[str, str]
    node: SharedNode

    @property
    def emulated(self) -> bool:
        """Whether the GPU is emulated."""
        return self.node.emulated

    def left_s(self) -> float:
        """The seconds that are left."""
        return self.deadline_s - time.monotonic()


# Takes one row as soon as it is measured.
Say = Callable[[Row], None]


@dataclass(frozen=True, slots=True)
class GpuBench:
    """A node with an empty GPU, a function that uses the node, and a native function."""

    node: WorkerNode
    ours: FunctionProcess
    native: FunctionProcess


@contextmanager
def gpu_bench(asked: PartOptions, *, native: bool = True) -> Iterator[GpuBench]:
    """Start the functions beside the node; MeasurementFailed where the node has no such GPU."""
    node = asked.node.ready()
    with ExitStack() as stack:
        enter = stack.enter_context
        theirs = node.environment(asked.environment, "bench", "wait")
        ours = enter(function_process(theirs, shim=True))
        yield GpuBench(node, ours, enter(function_process(asked.environment)) if native else ours)


def check_native(asked: PartOptions, device: str) -> None:
    """Raise MeasurementFailed unless native figures are those of a GPU."""
    if not asked.emulated and device != "cuda":
        raise MeasurementFailed("native PyTorch finds no GPU: install its CUDA build")


def while_time_is_left(asked: PartOptions, names: tuple[str, ...], each_s: float) -> Iterator[str]:
    """The names, as long as `each_s` are left; MeasurementFailed for those that are not reached."""
    for number, name in enumerate(names):
        if asked.left_s() < each_s:
            raise MeasurementFailed(f"no time was left for {', '.join(names[number:])}")
        yield name
