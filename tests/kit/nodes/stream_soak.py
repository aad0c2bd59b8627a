"""A hundred functions of one process, called, loaded and evicted at random: what is left of it all.

Every answer is checked, and at the end the process's memory by the system's own numbers.
"""

import os
import random
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from cache_manager.model.ids import MIB, ModelId
from gpu_manager.node.tenant_models import model_id
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient, needs

_WEIGHTS_BYTES = MIB
_CALLERS = 4
_MOST_CALL_MIB = 24
_GPU_MIB = 256  # less than all functions with the largest call
_QUIET_S = 4.0  # a pool gives free pages back two seconds after the last call
_PATIENCE_S = 60.0
# Of the pool, in blocks that are smaller than a page; beside the pool, what CPython and torch keep.
_MOST_POOL_BYTES, _MOST_LEFT_BYTES = MIB, 40 * MIB
_LEAST_MAPPING_BYTES = 1 << 32
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SoakFailed(Exception):
    """A wrong number, a lost process, or memory that stays."""


class SoakResult(NamedTuple):
    """What was done; the process's anonymous memory at rest, before and after, and the most.

    `pool_bytes` are those of the pool's mapping that are resident at the end.
    """

    calls: int
    refused: int
    evictions: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    pool_peak_bytes: int
    pool_bytes: int


def soak(seconds: float, *, functions: int, seed: int) -> SoakResult:
    """Call functions at random for so long; SoakFailed where anything is not as it was."""
    with ExitStack() as stack:
        it = stack.enter_context(node_thread(_GPU_MIB, runtime="stream"))
        images = []
        for number in range(functions):
            first = struct.pack("4f", *[float(number)] * 4)
            images.append(weights(first + bytes(_WEIGHTS_BYTES - len(first))))
            stack.callback(images[-1].close)
        return _Soak(it, images, seed).run(seconds)


class _Soak:
    def __init__(self, it: NodeThread, images: list[SealedWeights], seed: int) -> None:
        self._it = it
        self._images = images
        self._seed = seed
        self._calls = self._refused = self._evictions = 0
        self._peak_bytes = self._pool_peak_bytes = 0
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []

    def run(self, seconds: float) -> SoakResult:
        keeper = self._client("keeper")
        keeper.upload(self._images[0])
        self._call(keeper, 0, 1)
        (pid,) = set(self._it.pids())
        self._it.do(self._it.node.driver.pin(self._model(0)))  # so that the process stays
        time.sleep(_QUIET_S)
        before_bytes = anonymous_bytes(pid)
        ends_s = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._caller, args=(self._seed + n, ends_s))
            for n in range(_CALLERS)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes(pid))
            self._pool_peak_bytes = max(self._pool_peak_bytes, pool_bytes(pid))
            time.sleep(0.1)
        if self._failures:
            raise SoakFailed(repr(self._failures[0])) from self._failures[0]
        self._call(keeper, 0, 1)
        self._evict_all_but_one(pid)
        after_bytes = self._settled_bytes(pid, before_bytes)
        keeper.close()
        counts = self._calls, self._refused, self._evictions
        memory = before_bytes, self._peak_bytes, after_bytes
        return SoakResult(*counts, *memory, self._pool_peak_bytes, pool_bytes(pid))

    def _client(self, function: str) -> FunctionClient:
        return FunctionClient(self._it.address, self._it.credential(function))

    def _caller(self, seed: int, ends_s: float) -> None:
        chance = random.Random(seed)
        client = self._client(f"caller-{seed}")
        try:
            for image in self._images:
                client.upload(image)
            while time.monotonic() < ends_s:
                self._call(
                    client, chance.randrange(len(self._images)), chance.randint(1, _MOST_CALL_MIB)
                )
                if chance.random() < 0.02:
                    self._evict_one(chance)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._failures.append(error)
        finally:
            client.close()

    def _call(self, client: FunctionClient, number: int, mib: int) -> None:
        """A call with its memory, whose every number is checked."""
        found = client.use(self._images[number], needs(mib), x=1.0)
        client.release()
        expected = [(1.0 + number) * (mib * MIB // 4)] * 4
        if found != expected:
            raise SoakFailed(f"function {number} answered {found}, not {expected}")
        with self._lock:
            self._calls += 1

    def _evict_one(self, chance: random.Random) -> None:
        """Have some model leave; one that is in use is refused."""
        residents = self._residents()
        try:
            if residents:
                self._it.do(self._it.node.driver.evict(chance.choice(residents)))
                self._evictions += 1
        except Exception:  # noqa: BLE001 - in use, or gone since
            self._refused += 1

    def _evict_all_but_one(self, pid: int) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        kept = self._model(0)
        while (
            left := [model for model in self._residents() if model != kept]
        ) or self._it.leases():
            for model in left if not self._it.leases() else ():
                self._it.do(self._it.node.driver.evict(model))
            if time.monotonic() > deadline_s:
                raise SoakFailed(f"{len(left)} models do not leave")
            time.sleep(0.05)
        while set(self._it.pids()) != {pid} or len(self._it.pids()) != 1:
            if time.monotonic() > deadline_s:
                raise SoakFailed("the process is not the one that it was")
            time.sleep(0.05)

    def _settled_bytes(self, pid: int, before_bytes: int) -> int:
        """The memory at rest, once it has fallen to where it was or time is up."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            found_bytes, of_pool = anonymous_bytes(pid), pool_bytes(pid)
            if of_pool <= _MOST_POOL_BYTES and found_bytes <= before_bytes + _MOST_LEFT_BYTES:
                return found_bytes
            if time.monotonic() > deadline_s:
                detail = f"{found_bytes} bytes stay, {of_pool} of them the pool's"
                raise SoakFailed(f"{detail}; {before_bytes} were there before")
            time.sleep(0.2)

    def _model(self, number: int) -> ModelId:
        return model_id("team", self._images[number].digest)

    def _residents(self) -> list[ModelId]:
        def found(it: EmbeddedNode) -> list[ModelId]:
            return [model for gpu in it.manager.node.gpus.values() for model in gpu.residents]

        return self._it.run(found)


def pool_bytes(pid: int) -> int:
    """The resident memory of the pool's mapping, which is by far the largest; needs root."""
    found_bytes, is_pool = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[0] == "Size:":
            is_pool = int(words[1]) * 1024 >= _LEAST_MAPPING_BYTES
        elif words[0] == "Rss:" and is_pool:
            found_bytes += int(words[1]) * 1024
    return found_bytes


def anonymous_bytes(pid: int) -> int:
    """The resident memory of a process that is in no file."""
    _, resident, in_files, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(in_files)) * _PAGE_BYTES
