"""What the benches for a real GPU share: the node, the functions, the kept figures.

With `--devices cpu:1` they run on an emulated GPU to show that they work; its figures mean
nothing.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.measure.function_process import (
    FunctionProcess,
    function_process,
)
from bench.measure.report import (
    RESULTS,
    MeasurementFailed,
    load_average,
)
from bench.measure.worker_node import (
    WorkerNode,
    worker_node,
)
from common.sizes import parse_size
from gpu_manager.api import GpuManagerError

_EMULATED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class GpuBenchOptions:
    """The options of the command line."""

    devices: str
    gpu_memory_bytes: int | None
    models: tuple[str, ...]
    rounds: int
    environment: Mapping[str, str]

    @property
    def emulated(self) -> bool:
        """Whether the GPU is emulated."""
        return self.devices.startswith("cpu")


@dataclass(frozen=True, slots=True)
class GpuBench:
    """A node with an empty GPU, a function that uses the node, and a native function."""

    node: WorkerNode
    ours: FunctionProcess
    native: FunctionProcess


Measure = Callable[[GpuBenchOptions], dict[str, Any]]


def main(name: str, about: str, models: tuple[str, ...], measure: Measure) -> int:
    """Measure, and keep the figures in bench/results/; one line of error where there is no GPU."""
    parser = argparse.ArgumentParser(prog=f"bench.{name}", description=about)
    add = parser.add_argument
    add("--devices", default="cuda", help="cuda, cuda:0 or, to try the script, cpu:1 (cuda)")
    add("--gpu-memory", metavar="SIZE", help="bytes of the GPU to use, as in 8GiB (all)")
    add("--models", nargs="*", default=models, help="torchvision's names")
    add("--rounds", type=int, default=5, help="loads and pairs of measurements (5)")
    add("--output", type=Path, default=RESULTS, help="the folder to keep the JSON in")
    options = parser.parse_args()
    size = None if options.gpu_memory is None else parse_size(options.gpu_memory)
    environment = dict(os.environ)  # noqa: TID251 - an entry point
    asked = GpuBenchOptions(
        options.devices, size, tuple(options.models), options.rounds, environment
    )
    try:
        found = measure(asked)
    except (GpuManagerError, MeasurementFailed) as error:
        print(f"bench.{name}: {error}", file=sys.stderr)
        return 1
    _keep(name, options.output, asked, found)
    return 0


@contextmanager
def gpu_bench(
    asked: GpuBenchOptions, *, native: bool = True, linger_s: float | None = None
) -> Iterator[GpuBench]:
    """Start the node and the functions; MeasurementFailed where the node has no such GPU."""
    size = asked.gpu_memory_bytes or (_EMULATED_BYTES if asked.emulated else None)
    with ExitStack() as stack:
        enter = stack.enter_context
        found = enter(worker_node(asked.devices, size, linger_s))
        theirs = found.environment(asked.environment, "bench", "wait")
        ours = enter(function_process(theirs, shim=True))
        yield GpuBench(found, ours, enter(function_process(asked.environment)) if native else ours)


def check_native(asked: GpuBenchOptions, device: str) -> None:
    """Raise MeasurementFailed unless native figures are those of a GPU."""
    if not asked.emulated and device != "cuda":
        raise MeasurementFailed("native PyTorch finds no GPU: install its CUDA build")


def _keep(name: str, folder: Path, asked: GpuBenchOptions, found: dict[str, Any]) -> None:
    today = datetime.now(tz=UTC).date().isoformat()
    facts = {
        "bench": name,
        "date": today,
        "command": f"python -m bench.{name} {' '.join(sys.argv[1:])}".strip(),
        "devices": asked.devices,
        "emulated": asked.emulated,
        "torch": version("torch"),
        "load_average": load_average(),
    }
    folder.mkdir(exist_ok=True, parents=True)
    kind = "emulated-" if asked.emulated else ""
    path = folder / f"{today}-{kind}{name.replace('.', '-')}.json"
    path.write_text(json.dumps(facts | found, indent=1) + "\n", encoding="utf-8")
    print(path)
