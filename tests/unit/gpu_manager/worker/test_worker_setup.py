"""A worker's device and weights are prepared side by side, and what is reported when."""

import os
import threading
from collections.abc import Iterator, Sequence

import pytest

from gpu_manager.devices.image_file import VERIFIED, packed
from gpu_manager.devices.paths import DeviceLink
from gpu_manager.emulated.cpu_arithmetic import CpuArithmetic
from gpu_manager.worker import orders
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.executor import Executor
from gpu_manager.worker.hosted_model import HostedModel
from gpu_manager.worker.life import WorkerSetup
from tests.kit.processes.open_files import open_files
from tests.kit.waiting import PATIENCE_S, wait_until

SIZE = 8192
LOAD = orders.LoadImage(
    1,
    "d",
    [[0, SIZE]],
    SIZE,
    1 << 40,
    0.0,
    0.5,
    arriving=True,
    shared=False,
    gpu_share=1.0,
    merged=0,
    together_bytes=0,
    ahead=False,
)


class Bench:
    """A worker's set-up, whose context takes as long as a test wants."""

    def __init__(self) -> None:
        self.told: list[orders.WorkerOrder] = []
        self.context = threading.Event()
        self.loaded = threading.Event()
        self.setup = WorkerSetup(self.tell)
        self.model: HostedModel | None = None
        self.image = os.memfd_create("image")
        os.ftruncate(self.image, SIZE)
        self.pipe, self.manager = os.pipe2(os.O_CLOEXEC)

    def tell(self, order: orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        del descriptors
        self.told.append(order)

    def load(self) -> None:
        """Begin to load, as LOAD says; the set-up owns the descriptors."""
        device, table = self.setup.device, self.setup.table
        self.model = HostedModel(LOAD, device, table, CallsTogether(), self.tell, lambda: None)
        self.setup.load(self.model, LOAD, (self.image, self.pipe))

    @property
    def executor(self) -> Executor:
        assert self.model is not None
        return self.model.executor

    def assign(self) -> int:
        """What Assign does, less the rights, which the tests keep."""
        overhead_bytes = self.setup.overhead_bytes()
        self.setup.assigned.set()
        return overhead_bytes

    def say(self, number: int) -> None:
        os.write(self.manager, packed(number))

    def until_told(self) -> orders.WorkerOrder:
        wait_until(lambda: bool(self.told), "the worker reports")
        return self.told.pop()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    found = Bench()
    load = CpuArithmetic.load

    def load_and_tell(*arguments: object) -> object:
        storages = load(*arguments)  # type: ignore[arg-type] # whatever it is called with
        found.loaded.set()
        return storages

    monkeypatch.setattr(CpuArithmetic, "warm", lambda _: found.context.wait(PATIENCE_S))
    monkeypatch.setattr(CpuArithmetic, "load", load_and_tell)
    monkeypatch.setattr(CpuArithmetic, "limit", lambda *_: None)  # this process keeps its memory
    threads = set(threading.enumerate())
    yield found
    found.context.set()
    os.close(found.manager)
    wait_until(lambda: set(threading.enumerate()) <= threads, "every thread has ended")


def test_weights_are_in_place_before_the_context_is(bench: Bench) -> None:
    bench.setup.warm(orders.Warm("cpu", 0.0, 1 << 20), DeviceLink())
    bench.load()
    bench.say(SIZE)
    bench.say(VERIFIED)

    assert bench.loaded.wait(PATIENCE_S)
    assert bench.told == []  # for nothing can run yet
    bench.context.set()
    assert bench.assign() >= 1 << 20

    loaded = bench.until_told()
    assert isinstance(loaded, orders.ImageLoaded)
    assert loaded.memory_bytes >= (1 << 20) + SIZE
    assert loaded.transfer[0] <= loaded.context[1]
    assert list(bench.executor.images) == ["d"]
    assert bench.executor.run_s == 0.5


def test_load_is_not_over_before_the_worker_has_given_up_its_rights(bench: Bench) -> None:
    bench.context.set()
    bench.setup.warm(orders.Warm("cpu", 0.0, 0), DeviceLink())
    bench.load()
    bench.say(SIZE)
    bench.say(VERIFIED)
    assert bench.loaded.wait(PATIENCE_S)
    bench.setup.overhead_bytes()

    assert bench.told == []
    assert bench.executor.images == {}
    bench.assign()

    assert isinstance(bench.until_told(), orders.ImageLoaded)


def test_no_call_can_use_weights_before_the_manager_says_that_they_are_right(bench: Bench) -> None:
    bench.context.set()
    bench.setup.warm(orders.Warm("cpu", 0.0, 0), DeviceLink())
    bench.assign()
    bench.load()
    bench.say(SIZE)
    assert bench.loaded.wait(PATIENCE_S)

    assert bench.executor.images == {}
    assert bench.told == []
    bench.say(VERIFIED)

    assert isinstance(bench.until_told(), orders.ImageLoaded)
    assert list(bench.executor.images) == ["d"]


def test_load_fails_and_leaves_no_pipe_when_the_weights_never_come(bench: Bench) -> None:
    bench.context.set()
    bench.setup.warm(orders.Warm("cpu", 0.0, 0), DeviceLink())
    bench.assign()
    bench.load()
    bench.say(4096)
    before = bench.manager
    bench.manager = os.open(os.devnull, os.O_WRONLY)
    os.close(before)

    failed = bench.until_told()
    assert isinstance(failed, orders.ImageLoadFailed)
    assert "did not arrive" in failed.detail
    assert bench.executor.images == {}
    wait_until(lambda: str(bench.pipe) not in {number for number, _ in open_files()}, "closed")


def test_one_failure_is_told_when_the_device_cannot_be_used(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: CpuArithmetic) -> None:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(CpuArithmetic, "warm", fail)
    bench.setup.warm(orders.Warm("cpu", 0.0, 0), DeviceLink())
    bench.load()
    bench.say(SIZE)
    bench.say(VERIFIED)
    bench.assign()

    failed = bench.until_told()
    assert isinstance(failed, orders.ImageLoadFailed)
    assert "no such GPU" in failed.detail
    wait_until(
        lambda: not any(each.name == "setup" for each in threading.enumerate()), "both have ended"
    )
    assert bench.told == []
