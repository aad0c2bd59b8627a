"""`python -m bench.emptied_workers`: how long a load takes in an emptied worker, and in others.

On an emulated GPU without emulated times: no byte is copied there, and a context costs nothing.
What is left is what processes cost.
"""

import argparse
import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from bench.measure.report import BenchReport, MeasurementFailed, load_average
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import (
    EmptyHost,
    HostedModel,
    LoadOrder,
    Observer,
    PressureAnswer,
)
from gpu_manager.runtimes.worker_pool import PoolSettings

_MIB = 1 << 20
_SEALS = 0xF
_PATIENCE_S, _LOOK_S = 60.0, 0.01
_QUIET_S = 0.3  # after a spare worker was made


class LoadTimes(NamedTuple):
    """Seconds of one round for a model of a size; `emptying` is what it takes to leave."""

    fresh_s: float
    pool_s: float
    emptied_s: float
    emptying_s: float


class Unconcerned(Observer):
    """Takes reports of a runtime, none of which may be about a call or a death."""

    async def pressure(self, hosted: HostedModel, lease: int, need_bytes: int) -> PressureAnswer:
        """No call is made."""
        raise MeasurementFailed(
            f"{hosted.order.model} needs {need_bytes} bytes for a call of lease {lease}"
        )

    def died(self, hosted: HostedModel, cause: str) -> None:
        """End the measurement."""
        raise MeasurementFailed(f"the worker of {hosted.order.model} died: {cause}")

    def context_lost(self, host: EmptyHost, cause: str) -> None:
        """End the measurement."""
        raise MeasurementFailed(f"the empty worker {host.host} died: {cause}")


def main() -> None:
    """Measure each kind of load in turn, for some sizes; print a table."""
    parser = argparse.ArgumentParser(prog="bench.emptied_workers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 100, 500])
    parser.add_argument("--keep", action="store_true", help="write to bench/results/ too")
    options = parser.parse_args()
    command = f"python -m bench.emptied_workers --rounds {options.rounds}"
    report = BenchReport("What a load takes in an emptied worker", command)
    report.add(f"Load average before: {load_average()}. Medians (least, most), milliseconds.")
    report.add()
    report.add("| weights | fresh fork | worker of the pool | emptied worker | emptying |")
    report.add("| ---: | ---: | ---: | ---: | ---: |")
    for size_mib in options.sizes_mib:
        times = asyncio.run(measured(size_mib * _MIB, options.rounds))
        shown = " | ".join(_shown(column) for column in zip(*times, strict=True))
        report.add(f"| {size_mib} MiB | {shown} |")
    if options.keep:
        report.keep("emptied-workers")


async def measured(size_bytes: int, rounds: int) -> list[LoadTimes]:
    """The times of each round; a first one, which touches everything once, is left out."""
    with _image(size_bytes) as order:
        warm = _runtime(1)
        cold = _runtime(0)
        try:
            times = [await _round(warm, cold, order) for _ in range(rounds + 1)]
        finally:
            await warm.close()
            await cold.close()
    return times[1:]


async def _round(warm: ProcessRuntime, cold: ProcessRuntime, order: LoadOrder) -> LoadTimes:
    fresh, fresh_s = await _loaded(cold, order)
    await fresh.unload()
    await _until(lambda: warm.spares["cpu"] == 1)
    await asyncio.sleep(_QUIET_S)
    hosted, pool_s = await _loaded(warm, order)
    await _until(lambda: warm.spares["cpu"] == 1)
    await asyncio.sleep(_QUIET_S)
    began_s = time.perf_counter()
    left = await hosted.empty()
    emptying_s = time.perf_counter() - began_s
    if left is None:
        raise MeasurementFailed("the worker was not kept")
    again, emptied_s = await _loaded(warm, replace(order, model="b", emptied=left))
    if again.host != hosted.host:
        raise MeasurementFailed("the model was loaded in another process")
    await again.unload()
    return LoadTimes(fresh_s, pool_s, emptied_s, emptying_s)


async def _loaded(runtime: ProcessRuntime, order: LoadOrder) -> tuple[HostedModel, float]:
    began_s = time.perf_counter()
    hosted = await runtime.load(order)
    return hosted, time.perf_counter() - began_s


def _runtime(spares: int) -> ProcessRuntime:
    pool = PoolSettings(least=spares, most=spares, refill_delay_s=_QUIET_S)
    runtime = ProcessRuntime(Unconcerned(), ["cpu"], ProcessSettings(pool=pool))
    runtime.prepare()
    return runtime


@contextmanager
def _image(size_bytes: int) -> Iterator[LoadOrder]:
    """The order to load an image of this size."""
    descriptor = os.memfd_create("image", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        for start in range(0, size_bytes, _MIB):
            os.pwrite(descriptor, b"w" * min(_MIB, size_bytes - start), start)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        table = ((0, size_bytes),)
        names = ("a", "bench", "g0", "cpu", "d" * 64)
        yield LoadOrder(*names, table, size_bytes, descriptor, 8 << 30)
    finally:
        os.close(descriptor)


async def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise MeasurementFailed("no spare worker in a minute")
        await asyncio.sleep(_LOOK_S)


def _shown(times_s: Sequence[float]) -> str:
    least, most = min(times_s) * 1e3, max(times_s) * 1e3
    return f"{median(times_s) * 1e3:.1f} ({least:.1f}, {most:.1f})"


if __name__ == "__main__":
    main()
