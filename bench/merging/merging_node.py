"""A node with one emulated GPU, and processes of one function that call its model all the time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure.report import MeasurementFailed
from common.gpu_wishes import AS_MEASURED, UNMERGED, GpuWishes
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.node.settings import EmulatedTimes
from gpu_manager.runtimes.runtime import MergedSums
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.node_thread import NodeThread, node_thread

ROOT = Path(__file__).parents[2]
_PROCESSES, _LEASES, _GPU_MIB = 2, 32, 4096
_WARM_S = 3.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Calls a second, and seconds of calls; what the worker counted meanwhile."""

    rate: float
    p50_s: float
    p99_s: float
    merged: MergedSums


class _Function:
    """One process of the function, with some of the clients as threads."""

    def __init__(self, model: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.merging.calling_function", model],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, threads: int, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{threads} {seconds}\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementFailed(f"a function ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if found.get("wrong") or found.get("local"):
            raise MeasurementFailed(f"wrong answers: {found['wrong']}, local: {found['local']}")
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class MergingNode:
    """The node, and the clients of one model."""

    def __init__(self, node: NodeThread, functions: list[_Function]) -> None:
        self._node = node
        self._functions = functions

    def measure(self, clients: int, seconds: float) -> Figures:
        """Clients in a closed loop, after they have called for a while."""
        self._calls(clients, _WARM_S)
        before = self._node.run(_merges)
        begun_s = time.perf_counter()
        spent = sorted(self._calls(clients, seconds))
        rate = len(spent) / (time.perf_counter() - begun_s)
        time.sleep(0.6)  # the worker reports twice a second
        self._calls(1, 0.1)
        merged = _less(self._node.run(_merges), before)
        return Figures(rate, _quantile(spent, 0.5), _quantile(spent, 0.99), merged)

    def _calls(self, clients: int, seconds: float) -> list[float]:
        functions = self._functions[: min(clients, len(self._functions))]
        for function in functions:
            function.send(clients // len(functions), seconds)
        return [spent for each in functions for spent in each.receive()["seconds"]]


@contextmanager
def merging_node(model: str, *, merges: bool, run_s: float) -> Iterator[MergingNode]:
    """A node on which calls of a model run as one, or never; a run takes `run_s` at least."""
    with node_thread(_GPU_MIB, gpu_overlap=_LEASES, emulation=EmulatedTimes(run_s=run_s)) as node:
        wishes = GpuWishes(merged=AS_MEASURED if merges else UNMERGED)
        environment = _environment(node, FunctionIdentity("bench", model, wishes))
        with ExitStack() as stack:
            functions = []
            for _ in range(_PROCESSES):
                functions.append(_Function(model, environment))
                stack.callback(functions[-1].close)
            for function in functions:
                function.receive()
            yield MergingNode(node, functions)


def _environment(node: NodeThread, function: FunctionIdentity) -> dict[str, str]:
    credential = node.run(lambda it: it.manager.credentials.issue(function))
    base = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 - the bench is the entry point
    return node.environment(base, credential)


def _merges(node: EmbeddedNode) -> MergedSums:
    found = MergedSums()
    for gpu in node.manager.node.gpus.values():
        for resident in gpu.residents.values():
            found = found.plus(resident.merges)
    return found


def _less(now: MergedSums, before: MergedSums) -> MergedSums:
    singly = {why: times - before.singly.get(why, 0) for why, times in now.singly.items()}
    return MergedSums(
        now.groups - before.groups,
        now.calls - before.calls,
        now.compared - before.compared,
        {why: times for why, times in singly.items() if times},
    )


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")
