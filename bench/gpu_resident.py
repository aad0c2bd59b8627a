"""`python -m bench.gpu_resident`: how many of the 22 models a GPU holds, and their bytes."""

import sys
from typing import Any

from bench.gpu_common import Asked, bench, main
from bench.shim_orders import Order
from scheduler.sim.catalogue import table1

# The smallest first, so that as many as possible are counted.
MODELS = tuple(sorted(table1(), key=lambda name: table1()[name].memory_bytes))
_BATCH = 1


def measure(asked: Asked) -> dict[str, Any]:
    """Calls one model after the other until the first one has to leave, or all are there."""
    models: list[dict[str, Any]] = []
    resident = 0
    with bench(asked, native=False, linger_s=0.05) as found:
        memory_bytes = found.node.memory_bytes()
        for name in asked.models:
            answer = found.ours.ask(Order(name, batch=_BATCH, warm=1))
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
    sys.exit(main("gpu_resident", __doc__ or "", MODELS, measure))
