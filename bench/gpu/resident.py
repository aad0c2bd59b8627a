"""`python -m bench.gpu.resident`: how many of the 22 models a GPU holds, and their bytes."""

import sys
from typing import Any

from bench.gpu.gpu_bench import GpuBenchOptions, gpu_bench, main
from bench.measure.function_orders import FunctionOrder
from scheduler.sim.model_catalogue import table1

# The smallest first, so that as many as possible are counted.
MODELS = tuple(sorted(table1(), key=lambda name: table1()[name].memory_bytes))
_BATCH = 1


def measure(asked: GpuBenchOptions) -> dict[str, Any]:
    """Call one model after the other until the first is evicted or all are resident."""
    models: list[dict[str, Any]] = []
    resident = 0
    with gpu_bench(asked, native=False, linger_s=0.05) as found:
        memory_bytes = found.node.memory_bytes()
        for name in asked.models:
            answer = found.ours.ask(FunctionOrder(name, batch=_BATCH, warm=1))
            if found.node.evictions():
                break
            before = {entry["worker"] for entry in models}
            (new,) = (held for held in found.node.on_gpus() if held.pid not in before)
            resident = len(found.node.on_gpus())
            models.append(
                {
                    "model": name,
                    "worker": new.pid,
                    "weights_bytes": answer.weights_bytes,
                    "resident_bytes": new.memory_bytes,
                    "beyond_weights_bytes": new.memory_bytes - answer.weights_bytes,
                    "driver_bytes": found.node.process_bytes().get(new.pid),
                    "load_s": new.load_s,
                }
            )
            print(f"{name}: {new.memory_bytes:,} bytes, {answer.weights_bytes:,} of weights")
    print(f"{resident} of {len(asked.models)} models at once in {memory_bytes:,} bytes")
    return {
        "gpu_memory_bytes": memory_bytes,
        "batch": _BATCH,
        "resident": resident,
        "of": len(asked.models),
        "models": models,
    }


if __name__ == "__main__":
    sys.exit(main("gpu.resident", __doc__ or "", MODELS, measure))
