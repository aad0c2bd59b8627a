"""GPU memory per worker: as the ledger has it, and as the driver has it."""

from bench.gpu.gpu_bench import PartOptions, Say, gpu_bench, while_time_is_left
from bench.measure.function_orders import FunctionOrder
from bench.measure.report import MeasurementFailed

MODELS = ("squeezenet1_1", "resnet18", "resnet50", "densenet161", "vgg19")
_EMULATED = ("squeezenet1_1", "resnet18")
_MODEL_S = 12.0
# How far the ledger may be from the driver: a ledger that has less would let a GPU overflow.
_APART = 0.02


def measure(asked: PartOptions, say: Say) -> None:
    """Call one model after the other until the first is evicted or all are resident."""
    seen: set[int] = set()
    apart = []
    models = _EMULATED if asked.emulated else MODELS
    with gpu_bench(asked, native=False) as found:
        for name in while_time_is_left(asked, models, _MODEL_S):
            answer = found.ours.ask(FunctionOrder(name, warm=3))
            if found.node.evictions():
                say({"model": name, "resident": False})
                break
            (new,) = (held for held in found.node.on_gpus() if held.pid not in seen)
            seen.add(new.pid)
            driver_bytes = found.node.process_bytes().get(new.pid)
            say(
                {
                    "model": name,
                    "resident": True,
                    "weights_bytes": answer.weights_bytes,
                    "ledger_bytes": new.memory_bytes,
                    "beyond_weights_bytes": new.memory_bytes - answer.weights_bytes,
                    "driver_bytes": driver_bytes,
                    "load_s": new.load_s,
                }
            )
            if driver_bytes is not None and driver_bytes > new.memory_bytes * (1 + _APART):
                apart.append(f"{name}: ledger {new.memory_bytes}, driver {driver_bytes}")
        say({"resident": len(found.node.on_gpus()), "gpu_bytes": found.node.memory_bytes()})
    if apart:
        raise MeasurementFailed(f"the ledger has less than the driver: {'; '.join(apart)}")
