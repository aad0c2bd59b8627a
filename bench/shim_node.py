"""A GPU manager in a thread of this process, and functions in child processes."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch_shim
from bench.shim_orders import Answer, Order
from gpu_manager.api import NodeSettings, UnixAddress
from gpu_manager.devices.base import Device
from gpu_manager.leases import LeaseTimes
from gpu_manager.runtime import Observer, Runtime
from gpu_manager.workers import ProcessRuntime
from gpufaas.node import embedded_node

ROOT = Path(__file__).parents[1]
_PATIENCE_S = 60.0
_TENANT = "bench"

Environment = Mapping[str, str]
Answered = TypeVar("Answered")


class Failed(Exception):
    """A measurement could not be made, or would have measured something else."""


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A model on a GPU: what the manager knows of it."""

    model: str
    memory_bytes: int
    load_s: float
    pid: int


class Node:
    """A node with worker processes, on a loop of its own."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="node")
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def environment(self, base: Environment, function: str, tracing: str) -> dict[str, str]:
        """The environment of a function that uses this node."""
        device = self._node.manager.devices[0]
        return dict(base) | {
            "PYTHONPATH": str(Path(torch_shim.__file__).parent / "activate"),
            "CUDA_VISIBLE_DEVICES": "",  # a function has no GPU
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": str(self._node.addresses[0]),
            "GPUFAAS_CREDENTIAL": self._node.credential(_TENANT, function),
            "GPUFAAS_GPU_MEMORY": str(device.memory_bytes),
            "GPUFAAS_GPU_NAME": device.name,
            "GPUFAAS_TRACING": tracing,
        }

    def on_gpus(self) -> list[OnGpu]:
        """The models that are loaded."""
        return self._do(self._on_gpus())

    def memory_bytes(self) -> int:
        """Of the first GPU, as far as it may be used."""
        return self._node.manager.devices[0].memory_bytes

    def process_bytes(self) -> Mapping[int, int]:
        """What the driver says that each process takes of the first GPU, where it says so."""
        return self._node.manager.devices[0].process_bytes()

    def evictions(self) -> int:
        """How many models had to leave so far."""
        return self._node.status().counts.evictions

    def evict_all(self) -> None:
        """Leave no model on a GPU, and have a worker ready for the next one."""
        self._until(lambda: not self._do(self._leases()), "leases do not end")
        for found in self.on_gpus():
            self._do(self._node.driver.evict(found.model))  # type: ignore[arg-type] # a ModelId is a str
        self._until(lambda: not self.on_gpus(), "models do not leave")
        self.wait_for_worker()

    def wait_for_worker(self) -> None:
        """Have a worker ready in the pool, and whatever else was going on done."""
        self._until(lambda: all(self._runtime.spares.values()), "no worker comes")
        time.sleep(0.3)

    def stop(self) -> None:
        """Take it down."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _do(self, work: Coroutine[Any, Any, Answered]) -> Answered:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    async def _on_gpus(self) -> list[OnGpu]:
        gpus = self._node.manager.node.gpus.values()
        found = [resident.hosted for gpu in gpus for resident in gpu.residents.values()]
        return [
            OnGpu(str(hosted.order.model), hosted.memory_bytes, hosted.load_s, hosted.pid)
            for hosted in found
            if hosted is not None
        ]

    async def _leases(self) -> int:
        return len(self._node.manager.node.leases)

    def _until(self, true: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not true():
            if time.monotonic() > deadline_s:
                raise Failed(f"{otherwise} within {_PATIENCE_S:g} s")
            time.sleep(0.02)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            async with embedded_node(self._settings, make_runtime=self._make) as self._node:
                self._ready.set()
                await self._stopping.wait()
        except BaseException as error:
            if self._ready.is_set():
                raise
            self._failure = error  # whoever made this object is told
            self._ready.set()

    async def _make(self, observer: Observer, devices: Sequence[Device]) -> Runtime:
        self._runtime = ProcessRuntime(observer, [device.worker_device for device in devices])
        await self._runtime.start()
        return self._runtime


@contextmanager
def node(
    devices: str = "cpu:1", gpu_memory_bytes: int | None = None, linger_s: float | None = None
) -> Iterator[Node]:
    """A node that listens on an abstract socket, with a worker in its pool."""
    times = LeaseTimes() if linger_s is None else LeaseTimes(linger_s=linger_s)
    listen = (UnixAddress(f"@gpufaas-bench-{secrets.token_hex(8)}"),)
    made = Node(
        NodeSettings(
            "bench",
            listen,
            devices=devices,
            gpu_memory_bytes=gpu_memory_bytes,
            leases=times,
            drain_s=0.5,
        )
    )
    try:
        made.wait_for_worker()
        yield made
    finally:
        made.stop()


class Child:
    """A function process that carries out one order at a time."""

    def __init__(self, environment: Environment, *, shim: bool) -> None:
        self._shim = shim
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.shim_function"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, order: Order) -> None:
        """Have it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Answer:
        """Its answer; Failed if the shim's function ran something on its own processor."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"a function ended with {self._process.wait()}")
        answer = Answer(**json.loads(line))
        if self._shim and (answer.local or not answer.graphs):
            raise Failed(f"not answered by a worker: {answer.local or answer.device}")
        return answer

    def ask(self, order: Order) -> Answer:
        """Have something done."""
        self.tell(order)
        return self.hear()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def child(environment: Environment, *, shim: bool = False) -> Iterator[Child]:
    """A function process, natively or under the shim."""
    made = Child(environment, shim=shim)
    try:
        yield made
    finally:
        made.close()


def run(program: Sequence[str], environment: Environment) -> str:
    """Run a Python program to its end; what it printed."""
    found = subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return found.stdout


def load_average() -> str:
    """How busy the machine is, in processes, over a minute."""
    return f"{os.getloadavg()[0]:.1f}"
