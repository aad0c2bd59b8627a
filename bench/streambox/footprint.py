"""What many functions take of a GPU, and what their processes take of the machine."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.measure.report import MeasurementFailed
from bench.streambox.functions import BenchFunction, node
from cache_manager.model.ids import MIB
from gpufaas.embedded_node import EmbeddedNode

_GPU_MIB = 64 * 1024
_PATIENCE_S = 30.0


class Footprint(NamedTuple):
    """Bytes for all functions together."""

    granted_bytes: int
    weights_bytes: int
    calls_bytes: int
    anonymous_bytes: int
    processes: int


def footprint(runtime: str, made: Sequence[BenchFunction]) -> Footprint:
    """Load so many functions, call each of them, and look at the memory when nothing runs."""
    count = len(made)
    with node(runtime, _GPU_MIB) as it:
        clients = [function.client(it) for function in made]
        for function, client in zip(made, clients, strict=True):
            function.call(client)
        weights_bytes = sum(function.weights_bytes for function in made)
        deadline_s = time.monotonic() + _PATIENCE_S
        while len(it.run(_measured)) != count:
            if time.monotonic() > deadline_s:
                raise MeasurementFailed(f"not all of {count} models are measured: {runtime}")
            time.sleep(0.1)
        time.sleep(3.0)  # a pool gives free pages back two seconds after the last call
        pids = set(it.pids())
        calls_bytes = sum(function.activations_mib for function in made) * MIB
        anonymous_bytes = sum(map(_anonymous, pids))
        granted = it.run(granted_bytes)
        found = Footprint(granted, weights_bytes, calls_bytes, anonymous_bytes, len(pids))
        for client in clients:
            client.close()
    return found


def _measured(it: EmbeddedNode) -> list[str]:
    (gpu,) = it.manager.node.gpus.values()
    return [model for model, resident in gpu.residents.items() if resident.uses]


def granted_bytes(it: EmbeddedNode) -> int:
    """What the ledger of the node's GPU grants models and processes."""
    (gpu,) = it.manager.node.gpus.values()
    return gpu.ledger.granted_bytes


def _anonymous(pid: int) -> int:
    shares = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    (line,) = [line for line in shares.splitlines() if line.startswith("Pss_Anon:")]
    return int(line.split()[1]) * 1024
