"""`python -m bench.gpu.suspended_process`: a process like a worker's, which another one suspends.

It holds memory full of known numbers and a recorded graph, and answers what both give.
"""

import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gpu_manager.worker.sandbox import die_with, give_up_rights, isolate

ROOT = Path(__file__).parents[2]
NUMBER_BYTES = 8
_UID, _DESCRIPTORS, _PROCESSES = 62_345, 4096, 8192
_ROWS, _WIDTH = 8, 512  # of the graph's input; of the weights, that is one MiB of them
_ENDED_S = 1.0
_SET_NO_NEW_PRIVILEGES = 38


class Rights(StrEnum):
    """What the process has given up before it holds anything."""

    ALL = "keeps its rights"
    GIVEN_UP = "own user, system calls filtered"
    SANDBOX = "a worker's sandbox: also files and network"


class Outputs(NamedTuple):
    """The sum of the memory's numbers, and a digest of what the graph gives."""

    total: int
    replayed: str


class ProcessLost(Exception):
    """The process has ended, or does not answer."""


def expected_total(memory_bytes: int) -> int:
    """The sum of the numbers in so much memory: 0, 1, 2 ..."""
    count = memory_bytes // NUMBER_BYTES
    return count * (count - 1) // 2


class Suspended(Protocol):
    """A process as the one that suspends it has it."""

    pid: int

    def wait_until_ready(self, limit_s: float) -> list[str]:
        """What of its sandbox the system did not allow."""

    def outputs(self, limit_s: float) -> Outputs:
        """What memory and graph give now; ProcessLost where there is no answer."""

    def fate(self) -> str:
        """How it ended; empty if it has not."""

    def close(self) -> None:
        """Kill it."""


class SuspendedProcess:
    """A real process of this program."""

    def __init__(
        self, memory_bytes: int, rights: Rights, device: str, environment: Mapping[str, str]
    ) -> None:
        """Start it; `device` is `cpu`, or the GPU's UUID."""
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "bench.gpu.suspended_process"]
        command += [str(theirs.fileno()), str(memory_bytes), rights.name, device]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid

    def wait_until_ready(self, limit_s: float) -> list[str]:
        """What of its sandbox the system did not allow."""
        return [str(what) for what in self._answer(limit_s)]

    def outputs(self, limit_s: float) -> Outputs:
        """What memory and graph give now; ProcessLost where there is no answer."""
        try:
            self._pipe.send(None)
        except OSError as error:
            raise ProcessLost(self.fate() or "it takes no orders") from error
        return Outputs(*self._answer(limit_s))

    def fate(self) -> str:
        """How it ended; empty if it has not."""
        try:
            return f"the process ended with {self._process.wait(_ENDED_S)}"
        except subprocess.TimeoutExpired:
            return ""

    def close(self) -> None:
        """Kill it, in whatever state it is."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, limit_s: float) -> Any:
        try:
            if not self._pipe.poll(limit_s):
                raise ProcessLost(f"no answer within {limit_s:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ProcessLost(self.fate() or "it has closed its pipe") from error


def main(arguments: Sequence[str]) -> None:
    """Be that process until the other one hangs up."""
    descriptor, size, rights, device = arguments
    pipe, parent = Connection(int(descriptor)), os.getppid()
    die_with(parent)
    # As in a fork server: importing torch starts threads, and then some of it is too late.
    missing = isolate() if Rights[rights] is Rights.SANDBOX else []
    importlib.import_module("torch")
    context = None if device == "cpu" else _warm_context(device)
    if Rights[rights] is not Rights.ALL:
        # `isolate` does so too: without it the system takes no filter of system calls.
        ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        uid = 0 if os.geteuid() else _UID
        missing += give_up_rights(uid, _DESCRIPTORS, _PROCESSES, parent)
    outputs = _hold(int(size), context)
    pipe.send(missing)
    try:
        while True:
            pipe.recv()
            pipe.send(tuple(outputs()))
    except EOFError:
        return


def _warm_context(uuid: str) -> Any:
    """A worker's context on the GPU, which needs rights to be made."""
    cuda = "gpu_manager.cuda"
    importlib.import_module(f"{cuda}.libraries").open_libraries()
    context = importlib.import_module(f"{cuda}.context").CudaContext(uuid)
    context.warm()
    return context


def _hold(memory_bytes: int, context: Any) -> Callable[[], Outputs]:
    """Fill the memory, load weights and record work on both; what gives the outputs."""
    torch = importlib.import_module("torch")
    device = torch.device("cpu") if context is None else context.device
    memory = torch.arange(memory_bytes // NUMBER_BYTES, dtype=torch.int64, device=device)
    weights = _weights(torch, context)
    rows = torch.arange(_ROWS * _WIDTH, dtype=torch.float32, device=device).view(_ROWS, _WIDTH)

    def work() -> Any:
        return torch.tanh((rows / rows.numel()) @ weights) + memory[-_WIDTH:] % _WIDTH

    if context is None:
        result = work()

        def replay() -> None:
            result.copy_(work())
    else:
        graph, result = context.recorder.record(work)
        read_by_graph = (rows, weights)

        def replay() -> None:
            assert read_by_graph, "their memory would be given to others"
            graph.replay()

    def outputs() -> Outputs:
        result.zero_()  # so that an earlier replay's result is not taken for this one's
        replay()
        content = result.cpu().numpy().tobytes()
        return Outputs(int(memory.sum()), hashlib.sha256(content).hexdigest())

    return outputs


def _weights(torch: Any, context: Any) -> Any:
    """The same numbers on every device; to a GPU they come as a worker's do, through buffers."""
    made = torch.linspace(-1, 1, _WIDTH * _WIDTH).view(_WIDTH, _WIDTH)
    if context is None:
        return made
    images = importlib.import_module("gpu_manager.devices.image_file")
    descriptor = os.memfd_create("suspended-weights")
    size = os.write(descriptor, made.numpy().tobytes())
    (storage,) = context.load(images.ImageFile("weights", [[0, size]], size, descriptor))
    return torch.empty(0, device=context.device).set_(storage).view(_WIDTH, _WIDTH)


if __name__ == "__main__":
    main(sys.argv[1:])
