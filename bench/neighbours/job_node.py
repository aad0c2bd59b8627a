"""A node with one emulated GPU whose leases run at once, and a process for each function."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench.measure.report import MeasurementFailed
from cache_manager.model.ids import ModelId
from common.gpu_wishes import UNMERGED, GpuWishes
from gpu_manager.credentials import FunctionIdentity
from gpufaas.embedded_node import EmbeddedNode
from scheduler.features.neighbours import Neighbours
from scheduler.model.events import PolicySet
from tests.kit.nodes.node_thread import NodeThread, node_thread

ROOT = Path(__file__).parents[2]
GPU_MIB = 6144
AT_ONCE = 2
_PATIENCE_S = 120.0


class CallsJob(NamedTuple):
    """So many calls of a model, and the seconds that they take alone."""

    name: str
    model: str
    calls: int
    alone_s: float


class CallsDone(NamedTuple):
    """A job, and the seconds that it took."""

    name: str
    seconds: float


class _Function:
    """One process of a function."""

    def __init__(self, model: str, environment: Mapping[str, str], answers: "Answers") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.neighbours.job_function", model],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.ready = threading.Event()
        self._answers = answers
        self._reader = threading.Thread(target=self._read, name=f"answers of {model}")
        self._reader.start()

    def begin(self, job: CallsJob) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{job.name} {job.calls}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found.get("ready"):
                self.ready.set()
            else:
                self._answers.put(found)
        self._answers.put({"ended": True})


Answers = queue.SimpleQueue[dict[str, Any]]


class Fit(NamedTuple):
    """How good predictions are: over how many runs, and the errors of each when left out."""

    observed: int
    left_out_mse: float | None
    mean_slowdown: float


class JobNode:
    """The node, its functions, and what its scheduler has learned of them."""

    def __init__(self, node: NodeThread, functions: Mapping[str, _Function], answers: Answers):
        self._node = node
        self._functions = functions
        self._answers = answers
        self._ids: dict[str, ModelId] = {}

    def begin(self, job: CallsJob) -> None:
        """Start a job, which calls until it is done."""
        self._functions[job.model].begin(job)

    def next_done(self) -> CallsDone:
        """Wait for the next job that is done; its answers were right, and came from the GPU."""
        try:
            found = self._answers.get(timeout=_PATIENCE_S)
        except queue.Empty as error:
            raise MeasurementFailed(f"no job was done within {_PATIENCE_S:g} s") from error
        if found.get("ended"):
            raise MeasurementFailed("a function has ended")
        if found["wrong"] or found["local"]:
            raise MeasurementFailed(f"wrong answers: {found['wrong']}, local: {found['local']}")
        return CallsDone(found["job"], found["seconds"])

    def run(self, *jobs: CallsJob) -> list[CallsDone]:
        """Run these jobs at once."""
        for job in jobs:
            self.begin(job)
        return [self.next_done() for _ in jobs]

    def meet(self, model: str) -> None:
        """Call a model for the first time: the scheduler learns its name."""
        before = set(self._node.run(_known))
        self.run(CallsJob(f"first-{model}", model, 3, 0.0))
        (found,) = set(self._node.run(_known)) - before
        self._ids[model] = found

    def follow(self, policy: str) -> None:
        """Have the scheduler place by this policy from now on."""
        self._node.run(lambda it: it.driver.report(PolicySet(policy)))

    def has_metrics(self, model: str) -> bool:
        """Whether the scheduler knows what the model uses of the GPU."""
        name = self._ids[model]
        return self._node.run(lambda it: it.core.layer(Neighbours).metrics(name)) is not None

    def slowdown(self, model: str, other: str) -> float:
        """How many times as long the scheduler expects it to run beside the other one."""
        one, beside = self._ids[model], self._ids[other]

        def found(it: EmbeddedNode) -> float:
            (gpu,) = it.core.cluster.gpus.values()
            return it.core.layer(Neighbours).slowdown(one, gpu.spec.gpu_type, [(beside,)])

        return self._node.run(found)

    def metrics(self, model: str) -> Sequence[float]:
        """The model's metrics as they were measured."""
        name = self._ids[model]
        return self._node.run(lambda it: it.core.layer(Neighbours).metrics(name)) or ()

    def peak_bytes(self, model: str) -> int:
        """The most memory that the model was measured to need."""
        name = self._ids[model]
        return self._node.run(lambda it: it.core.cluster.profiles.known[name].memory_bytes)

    def fit(self) -> Fit | None:
        """How good the scheduler's predictions are."""

        def found(it: EmbeddedNode) -> Fit | None:
            (gpu,) = it.core.cluster.gpus.values()
            learned = it.core.layer(Neighbours).learned.get(gpu.spec.gpu_type)
            if learned is None:
                return None
            slowdowns = [slowdown for _, _, slowdown in learned.rows]
            return Fit(len(slowdowns), learned.left_out_mse(), fmean(slowdowns))

        return self._node.run(found)


def _known(it: EmbeddedNode) -> list[ModelId]:
    return list(it.core.cluster.profiles.known)


@contextmanager
def job_node(models: Sequence[str], cores: Sequence[int]) -> Iterator[JobNode]:
    """A node whose GPU is these cores: its workers, and all that this process starts, run there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with ExitStack() as stack:
            node = stack.enter_context(node_thread(GPU_MIB, gpu_concurrency=AT_ONCE))
            answers: Answers = queue.SimpleQueue()
            functions = {}
            for model in models:
                identity = FunctionIdentity("bench", model, GpuWishes(merged=UNMERGED))
                functions[model] = _Function(model, _environment(node, identity), answers)
                stack.callback(functions[model].close)
            for model, function in functions.items():
                if not function.ready.wait(_PATIENCE_S):
                    raise MeasurementFailed(f"the function of {model} does not begin")
            yield JobNode(node, functions, answers)
    finally:
        os.sched_setaffinity(0, before)


def _environment(node: NodeThread, function: FunctionIdentity) -> dict[str, str]:
    credential = node.run(lambda it: it.manager.credentials.issue(function))
    base = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 - the bench is the entry point
    return node.environment(base, credential)
