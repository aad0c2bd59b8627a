"""A function's start: the import of torch, the first answer, and the first one by a graph."""

import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.measure.comparisons import RATIO, ComparisonRow, Rounds, S
from bench.measure.function_process import (
    Environment,
    run,
)
from bench.measure.report import (
    MeasurementFailed,
)
from bench.measure.worker_node import (
    worker_node,
)

GIB = 1 << 30
_IMPORT = (
    "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"
)


def imports(environment: Environment, rounds: Rounds) -> Iterator[ComparisonRow]:
    """`import torch` in processes with and without the shim, in turn; no manager is asked."""
    with worker_node() as found:
        ours = found.environment(environment, "import", "wait")
    run(["-c", _IMPORT], environment)
    run(["-c", _IMPORT], ours)
    pairs, walls = [], []
    for number in range(rounds.count):
        kinds = [environment, ours] if number % 2 else [ours, environment]
        timed = [_import(kind) for kind in kinds]
        one, other = timed if number % 2 else reversed(timed)
        pairs.append((one[0], other[0]))
        walls.append((one[1], other[1]))
    yield _ratios("import torch", pairs)
    yield _ratios("a process that imports torch, from start to end", walls, target=None)


def starts(environment: Environment, model: str, tracing: str) -> Iterator[ComparisonRow]:
    """One model's first and second start, on a node that has loaded no model before."""
    native = _first(environment, model)
    with worker_node(gpu_memory_bytes=4 * GIB) as found:
        ours = found.environment(environment, "start", tracing)
        first, second = _first(ours, model), _first(ours, model)
    yield ComparisonRow(
        f"{model}, native: import torch to first answer", native["first_s"], S, more=native
    )
    for name, times in (("first", first), ("second", second)):
        if "graph_s" not in times:
            raise MeasurementFailed(f"no graph answered {model} within its {name} start")
        start = f"{model}, tracing={tracing}, {name} start"
        yield _row(f"{start}: first answer", native["first_s"], times["first_s"], times)
        target = 2.0 if name == "second" else None
        yield _row(
            f"{start}: first graph answer", native["first_s"], times["graph_s"], times, target
        )
    if tracing == "background":
        slowest = max(first["slowest_local_s"], second["slowest_local_s"])
        yield ComparisonRow(
            f"{model}, tracing=background: slowest call while tracing, over native",
            slowest / native["call_s"],
            RATIO,
            None,
            native["call_s"],
            slowest,
        )


def _row(
    name: str, native_s: float, ours_s: float, times: dict[str, float], target: float | None = None
) -> ComparisonRow:
    return ComparisonRow(name, ours_s, S, target, native_s, ours_s, S, more=times)


def _import(environment: Environment) -> tuple[float, float]:
    """Seconds of the import, and of the whole process."""
    began_s = time.perf_counter()
    import_s = float(run(["-c", _IMPORT], environment))
    return import_s, time.perf_counter() - began_s


def _ratios(
    name: str, pairs: list[tuple[float, float]], target: float | None = 1.10
) -> ComparisonRow:
    ratios = [ours / native for native, ours in pairs]
    natives, ours = zip(*pairs, strict=True)
    return ComparisonRow(
        name, median(ratios), RATIO, target, median(natives), median(ours), S, ratios
    )


def _first(environment: Environment, model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(["-m", "bench.shim.first_moments", model], environment))
    return found
