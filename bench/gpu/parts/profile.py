"""Load, run and peak of the thesis's 22 models on this GPU, as a profile of the simulator."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.gpu_bench import GpuBench, PartOptions, Say, gpu_bench
from bench.gpu.results_file import ResultsFile, Row
from bench.measure.function_orders import FunctionOrder
from bench.measure.report import MeasurementFailed
from cache_manager.model.ids import MIB
from gpu_manager.runtimes.runtime import LoadSpan
from scheduler.sim import model_catalogue
from scheduler.sim.model_catalogue import BATCH, SimModel

DATA = Path(model_catalogue.__file__).parent / "data"
COLUMNS = ("size_class", "model", "torchvision_name", "gpu_memory_mb", "load_s", "inference_s")
_MODEL_S = 9.0
_EMULATED = 2
_CALLS = 10
_WAITS = {"room", "weights", "worker", "context"}


def measure(asked: PartOptions, say: Say) -> None:
    """One row a model, of those that no earlier run has measured; then the profile of all rows."""
    table = list(csv.DictReader((DATA / "thesis-table1.csv").read_text("utf-8").splitlines()))
    # The smallest first: what is left out for want of time is what fewest runs need.
    table.sort(key=lambda row: int(row["gpu_memory_mb"]))
    chosen = table[:_EMULATED] if asked.emulated else table
    rows = {row["model"]: row for row in _earlier_rows(asked) if "model" in row}
    missing = [entry for entry in chosen if entry["model"] not in rows]
    if missing:
        with gpu_bench(asked, native=False) as bench:
            while missing and asked.left_s() > _MODEL_S:
                entry = missing.pop(0)
                row = rows[entry["model"]] = _measured(bench, entry, asked)
                say(row)
    if missing:
        names = ", ".join(entry["model"] for entry in missing)
        raise MeasurementFailed(f"no time was left for {names}; no profile is written")
    _keep(asked, [entry | _columns(rows[entry["model"]]) for entry in chosen], say)


def _earlier_rows(asked: PartOptions) -> list[Row]:
    """What runs before this one have measured, since this part goes on from there."""
    before = ResultsFile(asked.output, asked.gpu_type).parts.get("profile")
    return [] if before is None else before.rows


def _measured(bench: GpuBench, entry: dict[str, str], asked: PartOptions) -> Row:
    name = entry["torchvision_name"]
    batch = 1 if asked.emulated else BATCH
    before = {held.pid for held in bench.node.on_gpus()}
    bench.ours.ask(FunctionOrder(name, batch=batch, most_s=0.0))
    bench.node.wait_for_worker()  # the next one makes its context: not beside timed calls
    order = FunctionOrder(name, batch=batch, calls=_CALLS, warm=4, most_s=2.0)
    answer = bench.ours.ask(order)
    (resident,) = (held for held in bench.node.on_gpus() if held.pid not in before)
    bench.node.evict_all()
    bench.ours.ask(FunctionOrder(name, batch=batch, most_s=0.0))
    (again,) = bench.node.on_gpus()
    return {
        "model": entry["model"],
        "peak_bytes": resident.memory_bytes,
        "load_s": load_seconds(again.load_spans),
        "run_s": answer.compute_s / answer.calls,
        "call_s": min(answer.seconds),
    }


def load_seconds(spans: Sequence[LoadSpan]) -> float:
    """From the first to the last phase that is no wait for a worker or for its context."""
    own = [span for span in spans if span.phase not in _WAITS]
    return max(span.end_s for span in own) - min(span.begin_s for span in own)


def _columns(row: Row) -> dict[str, str]:
    return {
        "gpu_memory_mb": str(math.ceil(row["peak_bytes"] / MIB)),
        "load_s": f"{row['load_s']:.4f}",
        "inference_s": f"{row['run_s']:.5f}",
    }


def profile_of(asked: PartOptions) -> dict[str, SimModel] | None:
    """The profile that was measured on this kind of GPU, here or before; None without one."""
    for place in (asked.output / _name(asked), DATA / _name(asked)):
        if place.is_file():
            return model_catalogue.table1(str(place))
    return None


def _keep(asked: PartOptions, rows: list[dict[str, str]], say: Say) -> None:
    """Write it beside the results, and where `gpufaas simulate --profile` finds it by its name."""
    folders = [asked.output] if asked.emulated else [asked.output, DATA]
    for folder in folders:
        path = folder / _name(asked)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        say({"profile": asked.gpu_type, "models": len(rows), "file": str(path)})


def _name(asked: PartOptions) -> str:
    return f"{asked.gpu_type}-table1.csv"
