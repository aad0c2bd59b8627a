"""Real workers on one emulated GPU: a model is loaded while another one runs."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from cache_manager.model.ids import ModelId
from common.gpu_wishes import PROCESS, STREAM
from gpu_manager.node.leases import LeaseTimes
from gpu_manager.node.settings import EmulatedTimes
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.manager_client import SealedWeights, model
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient, alive
from tests.kit.waiting import wait_until
from tests.kit.worlds.gpu_node import granted_bytes

# A load of the other model takes so long that a test may be held up meanwhile.
LOAD_S, COLD_MIB = 6.0, 64
# Leases that are not used stay in force.
PATIENT = LeaseTimes(quiet_s=60.0, quantum_s=60.0)


@dataclass
class Answered:
    """One answer of a function that asked for a model that had to be loaded first."""

    numbers: list[float]
    granted_s: float
    ended_s: float


@dataclass
class Stage:
    """A node, a function whose model is loaded, and one whose model is not."""

    node: NodeThread
    warm: FunctionClient
    warm_image: SealedWeights
    cold: FunctionClient
    cold_image: SealedWeights
    threads: ThreadPoolExecutor

    def loading(self) -> bool:
        """Whether the node loads a model now."""

        def found(node: EmbeddedNode) -> bool:
            (gpu,) = node.manager.node.gpus.values()
            return any(each.hosted is None for each in gpu.residents.values())

        return self.node.run(found)

    def load(self) -> Future[Answered]:
        """Begin to load the other model, and wait until that is under way."""
        begun = self.threads.submit(self._call_the_other)
        wait_until(self.loading, "the load is under way")
        return begun

    def _call_the_other(self) -> Answered:
        self.cold.acquire(self.cold_image)
        granted_s = time.perf_counter()
        numbers = self.cold.call(self.cold_image)
        ended_s = time.perf_counter()
        self.cold.release()
        return Answered(numbers, granted_s, ended_s)


@contextmanager
def a_stage(policy: str = "beside", runtime: str = PROCESS, run_s: float = 0.02) -> Iterator[Stage]:
    images = [model(1.0), model(2.0, COLD_MIB)]
    emulation = EmulatedTimes(load_s_per_gib=LOAD_S * 1024 / COLD_MIB, run_s=run_s)
    with (
        node_thread(policy=policy, runtime=runtime, emulation=emulation, leases=PATIENT) as node,
        ThreadPoolExecutor(1) as threads,
    ):
        functions = [FunctionClient(node.address, node.credential()) for _ in images]
        for function, image in zip(functions, images, strict=True):
            function.upload(image)
        functions[0].use(images[0])
        functions[0].release()
        yield Stage(node, functions[0], images[0], functions[1], images[1], threads)
        for function in functions:
            function.close()
    for image in images:
        image.close()


def calls_during(stage: Stage, loading: Future[Answered]) -> int:
    """Calls of the loaded model that end before the other model is there."""
    ended_s: list[float] = []
    while not loading.done():
        assert stage.warm.use(stage.warm_image) == [2.0] * 4
        ended_s.append(time.perf_counter())
        stage.warm.release()
    answered = loading.result()
    assert answered.numbers == [3.0] * 4
    return sum(each < answered.granted_s for each in ended_s)


@pytest.mark.parametrize("runtime", [PROCESS, STREAM])
def test_model_runs_when_another_one_is_loaded_on_the_same_gpu(runtime: str) -> None:
    with a_stage(runtime=runtime) as stage:
        calls = calls_during(stage, stage.load())
        assert calls >= 5, f"{calls} calls of 0.02 s in a load of {LOAD_S:g} s"


def test_load_has_the_gpu_to_itself_when_the_policy_is_the_thesiss() -> None:
    with a_stage(policy="lalbo3") as stage:
        calls = calls_during(stage, stage.load())
        assert calls <= 1


def test_loaded_model_waits_for_its_turn_when_a_call_is_in_flight() -> None:
    run_s = 0.6
    with a_stage(run_s=run_s) as stage:
        loading = stage.load()
        stage.warm.acquire(stage.warm_image)
        began_s, calls = time.perf_counter(), 0
        while not calls or not loading.done():
            stage.warm.call(stage.warm_image)
            calls += 1
        ended_s = time.perf_counter()
        stage.warm.release()
        calls += loading.result().granted_s >= began_s
        assert ended_s - began_s >= run_s * 0.95 * calls, f"two of {calls} ran at the same time"


def test_books_are_even_when_loads_beside_runs_have_ended() -> None:
    with a_stage() as stage:
        assert stage.load().result().numbers == [3.0] * 4
        wait_until(lambda: not stage.node.leases(), "leases have ended")

        def books(node: EmbeddedNode) -> tuple[dict[ModelId, int], dict[ModelId, int]]:
            (gpu,) = node.manager.node.gpus.values()
            (core,) = node.status().gpus
            there = {each.model: each.memory_bytes for each in core.residents}
            assert not any(slot.leases for slot in core.slots)
            return granted_bytes(gpu), there

        granted, counted = stage.node.run(books)
        assert granted == counted
        assert len(granted) == 2


def test_call_is_answered_when_the_running_models_worker_is_killed_during_a_load() -> None:
    with a_stage() as stage:
        (pid,) = stage.node.pids()
        loading = stage.load()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), "it has ended")
        assert loading.result().numbers == [3.0] * 4
