"""What many functions take of a GPU, and what their processes take of the machine."""

import time
from pathlib import Path
from typing import NamedTuple

from bench.measure.report import MeasurementFailed
from bench.streambox.functions import functions, node
from cache_manager.model.ids import MIB
from gpufaas.daemons.embedded_node import EmbeddedNode

_GPU_MIB = 64 * 1024
_WEIGHTS_SHARE = 16  # the machine has no room for 64 whole models, and weights are not the point
_PATIENCE_S = 30.0


class Footprint(NamedTuple):
    """Bytes for all functions together."""

    granted_bytes: int
    weights_bytes: int
    anonymous_bytes: int
    processes: int


def footprint(runtime: str, count: int) -> Footprint:
    """Load so many functions, call each of them, and look at the memory when nothing runs."""
    with functions(count, weights_share=_WEIGHTS_SHARE) as made, node(runtime, _GPU_MIB) as it:
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
        found = Footprint(it.run(_granted), weights_bytes, sum(map(_anonymous, pids)), len(pids))
        for client in clients:
            client.close()
    return found


def _measured(it: EmbeddedNode) -> list[str]:
    (gpu,) = it.manager.node.gpus.values()
    return [model for model in gpu.ledger.models() if gpu.residents[model].uses]


def _granted(it: EmbeddedNode) -> int:
    (gpu,) = it.manager.node.gpus.values()
    return gpu.ledger.granted_bytes


def _anonymous(pid: int) -> int:
    shares = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    (line,) = [line for line in shares.splitlines() if line.startswith("Pss_Anon:")]
    return int(line.split()[1]) * 1024


def row(count: int, alone: Footprint, shared: Footprint) -> str:
    """A line of the table: beyond weights, for each function."""

    def each(total_bytes: int, found: Footprint) -> float:
        return (total_bytes - found.weights_bytes) / count / MIB

    return (
        f"| {count} | {alone.processes} | {shared.processes} "
        f"| {each(alone.granted_bytes, alone):.0f} | {each(shared.granted_bytes, shared):.0f} "
        f"| {alone.granted_bytes / shared.granted_bytes:.1f} "
        f"| {alone.anonymous_bytes / count / MIB:.1f} "
        f"| {shared.anonymous_bytes / count / MIB:.1f} |"
    )
