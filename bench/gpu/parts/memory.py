"""GPU memory per worker: as the ledger has it, and as the driver has it."""

from bench.gpu.gpu_bench import PartOptions, Say, gpu_bench, while_time_is_left
from bench.gpu.results_file import Row
from bench.measure.function_orders import FunctionOrder
from bench.measure.worker_node import OnGpu

MODELS = ("squeezenet1_1", "resnet18", "resnet50", "densenet161", "vgg19")
_EMULATED = ("resnet18", "resnet50")
_MODEL_S = 12.0
# How far the driver may be beyond the ledger before a row says so. What the driver keeps for code
# that is loaded late, for graphs and for libraries' handles is in no ledger.
_TOLERANCE_BYTES = 128 << 20


def measure(asked: PartOptions, say: Say) -> None:
    """Call one model after the other until the first is evicted or all are resident."""
    seen: set[int] = set()
    models = _EMULATED if asked.emulated else MODELS
    with gpu_bench(asked, native=False) as found:
        before = found.node.evictions()
        for name in while_time_is_left(asked, models, _MODEL_S):
            # Another seed than in other parts: there these models are new to the node.
            answer = found.ours.ask(FunctionOrder(name, seed=1, warm=3))
            if found.node.evictions() > before:
                say({"model": name, "resident": False})
                break
            (new,) = (held for held in found.node.on_gpus() if held.pid not in seen)
            seen.add(new.pid)
            say(_row(name, new, answer.weights_bytes, found.node.process_bytes().get(new.pid)))
        say({"resident": len(found.node.on_gpus()), "gpu_bytes": found.node.memory_bytes()})


def _row(name: str, held: OnGpu, weights_bytes: int, driver_bytes: int | None) -> Row:
    """A figure, and whether it is within the tolerance; None where the driver has no account."""
    beyond = None if driver_bytes is None else driver_bytes - held.memory_bytes
    return {
        "model": name,
        "resident": True,
        "weights_bytes": weights_bytes,
        "ledger_bytes": held.memory_bytes,
        "beyond_weights_bytes": held.memory_bytes - weights_bytes,
        "driver_bytes": driver_bytes,
        "driver_beyond_ledger_bytes": beyond,
        "within_128_mib": None if beyond is None else beyond <= _TOLERANCE_BYTES,
        "load_s": held.load_s,
    }
