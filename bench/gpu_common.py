"""What the benches for a real GPU share: the node, functions with and without it, the figures kept.

They run on an emulated GPU too (`--devices cpu:1`), to see that they work; its figures say nothing.
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

from bench.report import RESULTS
from bench.shim_node import Child, Failed, Node, child, load_average, node
from gpu_manager.api import GpuManagerError, parse_size

_EMULATED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for."""

    devices: str
    gpu_memory_bytes: int | None
    models: tuple[str, ...]
    rounds: int
    environment: Mapping[str, str]

    @property
    def emulated(self) -> bool:
        """Whether there is no GPU in it."""
        return self.devices.startswith("cpu")


@dataclass(frozen=True, slots=True)
class Bench:
    """A node with nothing on its GPU, a function that uses it, and one that uses the GPU itself."""

    node: Node
    ours: Child
    native: Child


Measure = Callable[[Asked], dict[str, Any]]


def main(name: str, about: str, models: tuple[str, ...], measure: Measure) -> int:
    """Measure and keep it in bench/results/; one line where there is no GPU."""
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
    asked = Asked(options.devices, size, tuple(options.models), options.rounds, environment)
    try:
        found = measure(asked)
    except (GpuManagerError, Failed) as error:
        print(f"bench.{name}: {error}", file=sys.stderr)
        return 1
    _keep(name, options.output, asked, found)
    return 0


@contextmanager
def bench(asked: Asked, *, native: bool = True, linger_s: float | None = None) -> Iterator[Bench]:
    """Everything started; Failed where the native function finds no GPU."""
    size = asked.gpu_memory_bytes or (_EMULATED_BYTES if asked.emulated else None)
    with ExitStack() as stack:
        enter = stack.enter_context
        found = enter(node(asked.devices, size, linger_s))
        theirs = found.environment(asked.environment, "bench", "wait")
        ours = enter(child(theirs, shim=True))
        yield Bench(found, ours, enter(child(asked.environment)) if native else ours)


def check_native(asked: Asked, device: str) -> None:
    """Failed unless native figures are those of a GPU."""
    if not asked.emulated and device != "cuda":
        raise Failed("native PyTorch finds no GPU: install its CUDA build")


def _keep(name: str, folder: Path, asked: Asked, found: dict[str, Any]) -> None:
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
    path = folder / f"{today}-{kind}{name.replace('_', '-')}.json"
    path.write_text(json.dumps(facts | found, indent=1) + "\n", encoding="utf-8")
    print(path)
