"""Load, run and peak of the thesis's 22 models on this GPU, as a profile of the simulator."""

import csv
import math
from pathlib import Path

from bench.gpu.gpu_bench import PartOptions, Say, gpu_bench
from bench.measure.function_orders import FunctionOrder
from bench.measure.report import MeasurementFailed
from cache_manager.model.ids import MIB
from scheduler.sim import model_catalogue
from scheduler.sim.model_catalogue import BATCH, SimModel

DATA = Path(model_catalogue.__file__).parent / "data"
COLUMNS = ("size_class", "model", "torchvision_name", "gpu_memory_mb", "load_s", "inference_s")
_MODEL_S = 9.0
_EMULATED = 2
_CALLS = 10


def measure(asked: PartOptions, say: Say) -> None:
    """One row a model; the profile is written after each, and complete only after the last."""
    table = list(csv.DictReader((DATA / "thesis-table1.csv").read_text("utf-8").splitlines()))
    # The smallest first: what is left out for want of time is what fewest runs need.
    table.sort(key=lambda row: int(row["gpu_memory_mb"]))
    chosen = table[:_EMULATED] if asked.emulated else table
    found: dict[str, dict[str, str]] = {}
    with gpu_bench(asked, native=False) as bench:
        for entry in chosen:
            if asked.left_s() < _MODEL_S:
                break
            name = entry["torchvision_name"]
            batch = 1 if asked.emulated else BATCH
            before = {held.pid for held in bench.node.on_gpus()}
            order = FunctionOrder(name, batch=batch, calls=_CALLS, warm=4, most_s=2.0)
            answer = bench.ours.ask(order)
            (resident,) = (held for held in bench.node.on_gpus() if held.pid not in before)
            bench.node.evict_all()
            spent_s = sum(bench.node.load_phases_s().values())
            bench.ours.ask(FunctionOrder(name, batch=batch, most_s=0.0))
            load_s = sum(bench.node.load_phases_s().values()) - spent_s
            found[entry["model"]] = entry | {
                "gpu_memory_mb": str(math.ceil(resident.memory_bytes / MIB)),
                "load_s": f"{load_s:.4f}",
                "inference_s": f"{answer.compute_s / answer.calls:.5f}",
            }
            say(
                {
                    "model": entry["model"],
                    "peak_bytes": resident.memory_bytes,
                    "load_s": load_s,
                    "run_s": answer.compute_s / answer.calls,
                    "call_s": min(answer.seconds),
                }
            )
    missing = [row["model"] for row in chosen if row["model"] not in found]
    if missing:
        raise MeasurementFailed(f"no time was left for {', '.join(missing)}; no profile is written")
    _keep(asked, [found[row["model"]] for row in chosen], say)


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
