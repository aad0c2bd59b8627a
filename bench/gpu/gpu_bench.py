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


@dataclass(frozen=True, slots=True)
class PartOptions:
    """What a part is told; it should begin nothing new after `deadline_s` of the steady clock."""

    devices: str
    gpu_type: str
    output: Path
    deadline_s: float
    environment: Mapping[str, str]
    gpu_memory_bytes: int | None = None

    @property
    def emulated(self) -> bool:
        """Whether the GPU is emulated."""
        return self.devices.startswith("cpu")

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
def gpu_bench(
    asked: PartOptions, *, native: bool = True, linger_s: float | None = 0.05
) -> Iterator[GpuBench]:
    """Start the node and the functions; MeasurementFailed where the node has no such GPU."""
    size = asked.gpu_memory_bytes or (_EMULATED_BYTES if asked.emulated else None)
    with ExitStack() as stack:
        enter = stack.enter_context
        found = enter(worker_node(asked.devices, size, linger_s))
        theirs = found.environment(asked.environment, "bench", "wait")
        ours = enter(function_process(theirs, shim=True))
        yield GpuBench(found, ours, enter(function_process(asked.environment)) if native else ours)


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
