"""A driver on virtual time with fake nodes, and a record of every event that it took in."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.clock import Cancellable
from scheduler.api import Placement
from scheduler.core.core import Core
from scheduler.model.events import Event
from scheduler.model.values import ModelSpec, Request, RequestId
from scheduler.service.driver import Driver
from tests.kit.cores.builders import a_core, gpu
from tests.kit.loop_clock import LoopClock
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.nodes.fake_node import FakeNode, fake_node

LOG = logging.getLogger("tests.kit.worlds.driver_stage")


class CountedClock(LoopClock):
    """The real clock, with a count of the callbacks that are still to come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._set: list[Cancellable] = []
        self._over: set[int] = set()

    @property
    def pending(self) -> int:
        return len([timer for timer in self._set if not _cancelled(timer)]) - len(self._over)

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        number = len(self._set)

        def call() -> None:
            self._over.add(number)
            callback()

        timer = super().call_at(when_s, call)
        self._set.append(timer)
        return timer


@dataclass
class Stage:
    """What one test plays on; callers are tasks by the names of their requests."""

    driver: Driver
    core: Core
    clock: CountedClock
    nodes: tuple[FakeNode, ...]
    events: list[tuple[float, Event]]
    callers: dict[RequestId, asyncio.Task[Placement]] = field(default_factory=dict)

    def ask(self, request: Request) -> asyncio.Task[Placement]:
        """A caller that asks for a GPU."""
        task = asyncio.ensure_future(self.driver.acquire(request))
        self.callers[request.id] = task
        return task

    def placed(self) -> dict[str, tuple[str, bool]]:
        """Of every caller that holds a lease: where, and whether that was a hit."""
        done = {name: task for name, task in self.callers.items() if _placed(task)}
        return {name: (task.result().slot, task.result().hit) for name, task in done.items()}

    def attach(self, node: FakeNode) -> None:
        """Let a node attach and report itself."""
        attach_in_process(self.driver, node)


def a_stage(
    *nodes: FakeNode, core: Core | None = None, models: Iterable[ModelSpec | str] = ("bert",)
) -> Stage:
    """A driver of this core (lalbo3, empty) to which these nodes (one, with one GPU) attach."""
    events: list[tuple[float, Event]] = []
    core = core or a_core(gpus=(), models=models)
    nodes = nodes or (fake_node("n0", gpu("g0", node="n0")),)
    clock = CountedClock(asyncio.get_running_loop())
    driver = Driver(core, clock, LOG, lambda now, event, _actions: events.append((now, event)))
    stage = Stage(driver, core, clock, nodes, events)
    for node in nodes:
        stage.attach(node)
    return stage


def _placed(task: asyncio.Task[Placement]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _cancelled(timer: Cancellable) -> bool:
    assert isinstance(timer, asyncio.TimerHandle)
    return timer.cancelled()
