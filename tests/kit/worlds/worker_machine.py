"""A runtime with real workers, driven from tests that are no coroutines."""

import asyncio
import os
import socket
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.liveness import LivenessTimes
from gpu_manager.emulated.memory_pool import pool_library
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import (
    EmptyHost,
    HostedModel,
    LoadOrder,
    MergedSums,
    Observer,
    PressureAnswer,
    Runtime,
)
from gpu_manager.runtimes.worker_pool import PoolSettings
from gpu_manager.worker.orders import Admission, CallsRan
from tests.kit.waiting import AsyncCondition, eventually
from tests.kit.worlds.caller import (
    DIGEST,
    Caller,
    Reply,
    program,
    sealed_image,
    step,
)
from torch_shim.wire.programs import DeviceName, Program, Ref

Answer = TypeVar("Answer")

# Runs for as long as it is let: some seconds.
LONG = program(
    step("t:torch.ones", [1200, 1200], device=DeviceName("cuda")),
    *(step("o:matmul", Ref(1), Ref(1 + n)) for n in range(2000)),
    output=[],
)


class Watcher(Observer):
    """Records what the runtime reports, and answers pressure as configured."""

    def __init__(self) -> None:
        self.metrics: list[float] = []
        self.runs: list[tuple[int, int, float, int]] = []
        self.claims: list[tuple[int, str]] = []
        self.called_by: list[tuple[int, str]] = []
        self.deaths: list[tuple[str, str]] = []
        self.lost: list[tuple[EmptyHost, str]] = []
        self.pressures: list[tuple[int, int]] = []
        self.relief = PressureAnswer(0, retry=False)
        self.held_bytes = 0  # of the last report
        self.merges = MergedSums()
        self.computed_s: dict[int, float] = {}

    def ran(self, hosted: HostedModel, report: CallsRan) -> None:
        del hosted
        if report.session:
            self.called_by.append((report.lease, report.session))
        self.held_bytes = report.held_bytes
        self.runs.append((report.lease, report.batch, report.run_s, report.peak_bytes))
        self.metrics = report.metrics or self.metrics

    def computed(self, hosted: HostedModel, lease: int, computed_s: float) -> None:
        del hosted
        self.computed_s[lease] = self.computed_s.get(lease, 0.0) + computed_s

    def merged(self, hosted: HostedModel, added: MergedSums) -> None:
        del hosted
        self.merges = self.merges.plus(added)

    def claimed(self, hosted: HostedModel, lease: int, session: str) -> None:
        del hosted
        self.claims.append((lease, session))

    async def pressure(self, hosted: HostedModel, lease: int, need_bytes: int) -> PressureAnswer:
        del hosted
        self.pressures.append((lease, need_bytes))
        return self.relief

    def died(self, hosted: HostedModel, cause: str) -> None:
        self.deaths.append((hosted.order.model, cause))

    def context_lost(self, host: EmptyHost, cause: str) -> None:
        self.lost.append((host, cause))


class Machine:
    """A runtime on a loop that runs when it is asked something."""

    def __init__(self, liveness: LivenessTimes = LivenessTimes()) -> None:  # noqa: B008 - it never changes
        self.runner = asyncio.Runner()
        self.watcher = Watcher()
        pool = PoolSettings(forked=0, refill_delay_s=0.0)
        settings = ProcessSettings(
            pool=pool, load_timeout_s=20, liveness=liveness, pool_library=pool_library()
        )
        self.runtime = self.run(self._start(settings))
        self.chosen: Runtime = self.runtime  # which loads models
        self.weights = torch.arange(1 << 20, dtype=torch.float32)
        self.image, self.table, self.total = sealed_image(self.weights)

    async def _start(self, settings: ProcessSettings) -> ProcessRuntime:
        runtime = ProcessRuntime(self.watcher, ["cpu"], settings)
        runtime.prepare()
        return runtime

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return self.runner.run(work)

    def call(self, caller: Caller, what: Program, *inputs: Any, **more: Any) -> Reply:
        """A call during which the loop runs."""
        return self.run(asyncio.to_thread(caller.call, what, *inputs, **more))

    def load(self, **changes: Any) -> HostedModel:
        return self.run(self.chosen.load(self.order(**changes)))

    def order(self, **changes: Any) -> LoadOrder:
        order = LoadOrder(
            model="m",
            tenant="t",
            gpu="g0",
            device="cpu",
            digest=DIGEST,
            table=self.table,
            total_bytes=self.total,
            image=self.image,
            limit_bytes=1 << 30,
        )
        return replace(order, **changes)

    def connect(self, hosted: HostedModel, session: str = "s") -> Caller:
        ours, theirs = socket.socketpair()

        async def hand_over() -> None:
            hosted.channel(session, "f", theirs)

        self.run(hand_over())
        return Caller(ours)

    def admit(self, hosted: HostedModel, lease: int = 7, session: str = "s") -> None:
        async def say() -> None:
            hosted.admit(Admission(lease, session))

        self.run(say())

    def until(self, holds: AsyncCondition, what: str) -> None:
        """Wait for it; whatever is reported meanwhile is read."""
        self.run(eventually(holds, what, instead=lambda: f"instead: {vars(self.watcher)}"))

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counting


def pid_of(hosted: HostedModel) -> int:
    """The process of a model whose runtime names it."""
    assert hosted.host is not None
    return hosted.host.pid


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


async def until_it_computes(hosted: HostedModel) -> None:
    """Wait until the worker has computed for half a second, longer than it takes to read a call."""
    stat = Path(f"/proc/{pid_of(hosted)}/stat")

    def ticks() -> int:
        return int(stat.read_text().rpartition(")")[2].split()[11])

    before = ticks()
    wanted = before + os.sysconf("SC_CLK_TCK") // 2
    await eventually(lambda: ticks() >= wanted, "it computes")
