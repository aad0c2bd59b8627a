"""`python -m bench.cold_start`: set-ups of one model and of ten, on emulated disk, PCIe, contexts.

The times are those of resnet50 in the SAGE paper (Table 4). Each figure is a median.
"""

import argparse
import secrets
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.measure.report import BenchReport
from cache_manager.model.ids import MIB
from common.addresses import UnixAddress
from gpu_manager.api import EmulatedTimes, NodeSettings
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import LoadSpan, Observer, Runtime
from gpu_manager.runtimes.worker_pool import PoolSettings
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread
from tests.kit.nodes.worker_client import FunctionClient
from torch_shim.errors import ConnectionLost

# resnet50's: Table 2's weights, Table 4's seconds. A machine of two cores does not read and hash as
# fast as the paper's disk: weights of a smaller part take as long on paths slower by as much.
WHOLE_BYTES, SCALE = 97_700_000, 8
CONTEXT_S, DISK_S, PCIE_S, COMPUTE_S = 0.2851, 0.0672, 0.0217, 0.0243
PAPER_S = {"cold": 0.3105, "stage 4": 0.3095, "stage 3": 0.3095, "baseline": 0.3994}
PAPER_CONTENTION = 34.9
CONTEXT_BYTES = 414 * MIB
_MANY = 10
_PATIENCE_S, _REST_S = 60.0, 0.2


@dataclass(frozen=True, slots=True)
class SetUp:
    """One first call: how long it took, and the parts of the load."""

    whole_s: float
    spans: tuple[LoadSpan, ...]

    def phase_s(self, *phases: str) -> float:
        """From the beginning of the first of these phases to the end of the last one."""
        found = [span for span in self.spans if span.phase in phases]
        begin_s = min((span.begin_s for span in found), default=0.0)
        return max((span.end_s for span in found), default=0.0) - begin_s


class PoolSize(NamedTuple):
    """How many workers wait with a context, and how many without."""

    spares: int
    forked: int


POOLS = {"empty": PoolSize(0, 0), "a fork": PoolSize(0, 1), "a context": PoolSize(1, 0)}


class Bed:
    """A node with emulated GPUs, whose host memory holds the weights of one model."""

    def __init__(
        self, folder: Path, gpus: int, pool: PoolSize, weights_bytes: int, emulation: EmulatedTimes
    ) -> None:
        self.weights_bytes = weights_bytes
        self._pool = pool
        self._emulation = emulation
        settings = NodeSettings(
            node="node",
            listen=(UnixAddress(f"@gpufaas-cold-{secrets.token_hex(8)}"),),
            devices=f"cpu:{gpus}",
            gpu_memory_bytes=1 << 30,
            store_memory_bytes=weights_bytes + MIB,
            spill=folder,
            emulation=emulation,
            drain_s=0.5,
        )
        self.thread = NodeThread(settings, self._make_runtime)
        self._client = FunctionClient(self.thread.address, self.thread.credential())
        self._other = self.image(-1)
        self._client.upload(self._other)

    def image(self, number: int) -> SealedWeights:
        """Make the weights of a model."""
        return weights(struct.pack("4f", *[number] * 4) + bytes(self.weights_bytes - 16))

    def add(self, image: SealedWeights) -> None:
        """Have the node know these weights; those before go to its disk."""
        self._client.upload(image)

    def set_up(self, image: SealedWeights) -> SetUp:
        """Call the model on an empty GPU, once."""
        client = FunctionClient(self.thread.address, self.thread.credential())
        try:
            begin_s = time.monotonic()
            client.acquire(image)
            client.call(image)
            whole_s = time.monotonic() - begin_s
        finally:
            client.close()
        return SetUp(whole_s, self._spans(image))

    def clear(self, *, to_disk: bool) -> None:
        """Leave nothing on the GPUs, and in host memory what was there last, or nothing of it."""
        self._until(lambda: not self.thread.leases(), "leases end")
        gpus = self.thread.run(lambda it: it.status().gpus)
        for model in [resident.model for gpu in gpus for resident in gpu.residents]:
            self.thread.do(self.thread.node.driver.evict(model))
        self._until(lambda: not self.thread.pids(), "workers end")
        if to_disk:
            store = self.thread.node.manager.library.store
            store.open(self._other.digest).release()
        self._until(self._is_ready, "there are as many spare workers as there should be")
        time.sleep(self._emulation.context_s + _REST_S)  # the spare workers' contexts are made

    def close(self) -> None:
        """End the node."""
        self._client.close()
        self._other.close()
        self.thread.stop()

    def _spans(self, image: SealedWeights) -> tuple[LoadSpan, ...]:
        def found(_: object) -> tuple[LoadSpan, ...]:
            gpus = self.thread.node.manager.node.gpus.values()
            residents = [each for gpu in gpus for each in gpu.residents.values()]
            (spans,) = [
                each.load_spans
                for each in residents
                if each.hosted is not None and each.hosted.order.digest == image.digest
            ]
            return spans

        return self.thread.run(found)

    def _is_ready(self) -> bool:
        found = self.thread.run(
            lambda _: (self._runtime.spares.get("cpu", 0), self._runtime.forked)
        )
        return found == self._pool

    async def _make_runtime(self, observer: Observer, devices: Sequence[GpuDevice]) -> Runtime:
        pool = PoolSettings(
            least=self._pool.spares,
            most=self._pool.spares,
            forked=self._pool.forked,
            window_s=0.1,
            context_s=self._emulation.context_s,
            context_bytes=self._emulation.context_bytes,
        )
        kinds = [device.worker_device for device in devices]
        self._runtime = ProcessRuntime(observer, kinds, ProcessSettings(pool=pool))
        return self._runtime

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not holds():
            if time.monotonic() > deadline_s:
                raise TimeoutError(what)
            time.sleep(0.02)


@contextmanager
def bed(weights_bytes: int, gpus: int, pool: PoolSize) -> Iterator[Bed]:
    """A node whose disk, PCIe and contexts take the paper's times for these weights."""
    emulation = EmulatedTimes(
        run_s=COMPUTE_S,
        disk_bytes_per_s=weights_bytes / DISK_S,
        pcie_bytes_per_s=weights_bytes / PCIE_S,
        context_s=CONTEXT_S,
        context_bytes=CONTEXT_BYTES,
    )
    with tempfile.TemporaryDirectory(prefix="cold-start") as folder:
        found = Bed(Path(folder), gpus, pool, weights_bytes, emulation)
        try:
            yield found
        finally:
            found.close()


def one_model(weights_bytes: int, times: int, *, from_disk: bool) -> dict[str, list[SetUp]]:
    """Set-ups of one model, alone on its node, by what the pool has; the pools take turns."""
    found: dict[str, list[SetUp]] = {pool: [] for pool in POOLS}
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(bed(weights_bytes, 1, POOLS[name])) for name in POOLS}
        image = next(iter(nodes.values())).image(0)
        stack.callback(image.close)
        for node in nodes.values():
            node.add(image)
            node.set_up(image)  # starts the process that forks workers
        for _ in range(times):
            for name, node in nodes.items():
                node.clear(to_disk=from_disk)
                found[name].append(node.set_up(image))
    return found


def many_models(weights_bytes: int, times: int) -> list[list[SetUp]]:
    """Set-ups of ten models at once, with everything cold; each on a GPU of its own."""
    with bed(weights_bytes, _MANY, POOLS["empty"]) as node:
        images = [node.image(number) for number in range(_MANY)]
        for image in images:
            node.add(image)
        node.set_up(images[0])
        found = []
        for _ in range(times):
            node.clear(to_disk=True)
            found.append(_at_once(node, images))
        for image in images:
            image.close()
        return found


def _at_once(node: Bed, images: Sequence[SealedWeights]) -> list[SetUp]:
    found: list[SetUp] = []
    failed: list[BaseException] = []

    def one(image: SealedWeights) -> None:
        try:
            found.append(node.set_up(image))
        except (ConnectionLost, AssertionError, ValueError) as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(image,)) for image in images]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def main() -> None:
    """Measure, and print a table of milliseconds."""
    parser = argparse.ArgumentParser(prog="python -m bench.cold_start", description=__doc__)
    parser.add_argument("--times", type=int, default=9, help="set-ups for each median (9)")
    parser.add_argument("--keep", action="store_true", help="write bench/results/")
    scale = f"weights of 1/N of resnet50's, on paths slower by as much ({SCALE})"
    parser.add_argument("--scale", type=int, default=SCALE, metavar="N", help=scale)
    options = parser.parse_args()
    weights_bytes = WHOLE_BYTES // options.scale
    report = BenchReport(
        "Set-ups on emulated paths", f"python -m bench.cold_start --scale {options.scale}"
    )
    alone = {
        (source, pool): found
        for source in ("disk", "host")
        for pool, found in one_model(
            weights_bytes, options.times, from_disk=source == "disk"
        ).items()
    }
    _add_set_ups(report, alone)
    _add_table_4(report, alone)
    _add_contention(
        report, alone["disk", "empty"], many_models(weights_bytes, max(3, options.times // 3))
    )
    if options.keep:
        report.keep("cold-start")


def _add_set_ups(report: BenchReport, alone: dict[tuple[str, str], list[SetUp]]) -> None:
    """Add the set-ups, and the sums of their parts: of the one with nothing else, and the rest."""
    parts = ("worker", "context", "read", "verify")
    report.add()
    report.add(f"| weights in | pool | {' | '.join(parts)} | transfer | in sequence | measured |")
    report.add("|" + "---|" * 9)
    least_s = median(each.whole_s for each in alone["host", "a context"])
    for (source, pool), found in alone.items():
        parts_s = [median(each.phase_s(part) for each in found) for part in parts]
        transfer_s = median(each.phase_s("transfer") for each in found)
        whole_s = median(each.whole_s for each in found)
        figures = [*parts_s, transfer_s, least_s + sum(parts_s), whole_s]
        cells = [source, pool, *map(_ms, figures)]
        report.add(f"| {' | '.join(cells)} |")


def _add_table_4(report: BenchReport, alone: dict[tuple[str, str], list[SetUp]]) -> None:
    report.add()
    report.add("| Table 4, ms | paper | measured | ratio |")
    report.add("|---|---|---|---|")
    for column, *key in (
        ("cold", "disk", "empty"),
        ("stage 4", "disk", "a fork"),
        ("stage 3", "host", "a fork"),
    ):
        measured_s = median(each.whole_s for each in alone[key[0], key[1]])
        paper_s = PAPER_S[column]
        ratio = measured_s / paper_s
        report.add(f"| {column} | {paper_s * 1e3:.1f} | {measured_s * 1e3:.1f} | {ratio:.3f} |")


def _add_contention(
    report: BenchReport, one: Sequence[SetUp], many: Sequence[Sequence[SetUp]]
) -> None:
    loading_s = median(each.phase_s("read", "transfer") for each in one)
    each_s = median(each.phase_s("read", "transfer") for found in many for each in found)
    whole_s = median(each.whole_s for each in one)
    last_s = median(max(each.whole_s for each in found) for found in many)
    report.add()
    report.add(
        f"Disk and PCIe, one model: {loading_s * 1e3:.1f} ms; of ten at once, the median: "
        f"{each_s * 1e3:.1f} ms, {each_s / loading_s:.1f} times (paper: {PAPER_CONTENTION})."
    )
    report.add(
        f"First call, one model: {whole_s * 1e3:.1f} ms; the last of ten at once: "
        f"{last_s * 1e3:.1f} ms, {last_s / whole_s:.1f} times."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    main()
