"""One process through the models that follow each other in it, and what its end means then."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gpu_manager.runtimes.fork_client import ForkedWorker
from gpu_manager.runtimes.hosting_worker import WorkerHostedModel
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import EmptyHost, HostedModel, LoadOrder, Observer
from gpu_manager.runtimes.stream import ChosenRuntime, ProcessBreaks
from gpu_manager.worker import orders
from tests.kit.virtual_time import virtually
from torch_shim.errors import ConnectionLost

ORDER = LoadOrder("a", "t", "g0", "cpu", "d", (), 0, image=-1, limit_bytes=0)
SHARED = replace(ORDER, runtime="stream")


class ObedientWorker(ForkedWorker):
    """A worker without a process, which does at once what it is told."""

    def __init__(self) -> None:
        self.name, self.pid, self.cause = "w", 7, ""
        self.exited = asyncio.get_running_loop().create_future()
        self._reports: asyncio.Queue[orders.WorkerOrder | None] = asyncio.Queue()

    async def send(self, order: orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        self.send_now(order, descriptors)

    def send_now(self, order: orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        del descriptors
        match order:
            case orders.Assign():
                self._reports.put_nowait(orders.Ready([], 0))
            case orders.LoadImage(model=model):
                self._reports.put_nowait(orders.ImageLoaded(model, 0.0, 5, [], []))
            case orders.DropModel(model=model):
                self._reports.put_nowait(orders.ModelDropped(model, 3))
            case orders.EndCalls(model=model, lease=lease):
                self._reports.put_nowait(orders.CallsEnded(model, lease, 0.0))
            case _:
                pass

    async def receive(self) -> tuple[orders.WorkerOrder, tuple[int, ...]]:
        report = await self._reports.get()
        if report is None:
            raise ConnectionLost("the worker hung up")
        return report, ()

    def kill(self, cause: str) -> None:
        self.cause = self.cause or cause
        self._reports.put_nowait(None)

    async def wait_for_exit(self, cause: str) -> None:
        self.cause = self.cause or cause
        if not self.exited.done():
            self.exited.set_result(None)

    def watch(self, *_: object) -> None:
        """It is never frozen."""


class WithObedientWorkers(ProcessRuntime):
    """Every worker that is not an emptied one is a new one of these."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(observer, ["cuda"], ProcessSettings(change_user=False))

    async def _take(self, order: LoadOrder, *, fresh: bool = False) -> ForkedWorker:
        del order, fresh
        return ObedientWorker()


class Losses(Observer):
    """Notes the ends that nobody has ordered."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def died(self, hosted: HostedModel, cause: str) -> None:
        self.seen.append((hosted.order.model, cause))

    def context_lost(self, host: EmptyHost, cause: str) -> None:
        self.seen.append((host, cause))


def called(model: HostedModel) -> WorkerHostedModel:
    """The model, with a call under way for all that the manager knows."""
    assert isinstance(model, WorkerHostedModel)
    model.admit(orders.Admission(1, "t/f/1", False, False, orders.USUAL_TERMS))
    return model


@virtually
async def test_end_of_a_process_is_a_break_when_its_last_model_was_for_a_shared_one() -> None:
    """A model that has the process for itself breaks nothing of others, whoever was there."""
    for last, counted in ((SHARED, 1), (ORDER, 0)):
        breaks = ProcessBreaks()
        runtime = ChosenRuntime(WithObedientWorkers(Losses()), breaks=breaks)
        first = await runtime.load(SHARED)
        emptied = await first.empty()
        again = called(await runtime.load(replace(last, model="b", emptied=emptied)))
        assert isinstance(first, WorkerHostedModel)
        assert again.worker is first.worker
        again.worker.kill("its program broke it")
        assert await again.closed == "its program broke it"
        await asyncio.sleep(0)
        assert (breaks["a"], breaks["b"]) == (0, counted), last.runtime


@virtually
async def test_end_of_an_emptied_process_is_told_once_unless_it_was_ordered() -> None:
    losses = Losses()
    runtime = WithObedientWorkers(losses)
    left = await (await runtime.load(ORDER)).empty()
    assert left is not None
    assert (runtime.empty, left.memory_bytes) == ((left,), 3)
    await left.end()
    assert (runtime.empty, losses.seen) == ((), [])

    model = await runtime.load(ORDER)
    left = await model.empty()
    assert left is not None
    model.worker.kill("somebody killed it")
    assert await left.closed == "somebody killed it"
    assert (runtime.empty, losses.seen) == ((), [(left, "somebody killed it")])

    taken = await runtime.load(replace(ORDER, model="b", emptied=left))  # by another process
    assert taken.worker is not model.worker
    await (await taken.empty() or left).end()
    assert len(losses.seen) == 1
