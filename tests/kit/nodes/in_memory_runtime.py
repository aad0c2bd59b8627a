"""A runtime without processes: models are entries in a list, a test sets how long calls take.

It claims to run each model in a process of its own, or all models of a GPU and tenant in one.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from common.gpu_wishes import PROCESS
from gpu_manager.errors import LoadFailure
from gpu_manager.runtimes.runtime import (
    EmptyHost,
    HostedId,
    HostedModel,
    HostProcess,
    LoadOrder,
    LoadSpan,
    Observer,
    PressureAnswer,
)
from gpu_manager.worker.orders import Admission, CallsRan, LeaseTerms, WorkerOrder

# Carries out an order of a feature, with its descriptors.
CarryOut = Callable[[WorkerOrder, Sequence[int]], None]


def calls_ran(
    lease: int,
    batch: int,
    run_s: float,
    peak_bytes: int,
    calls: int = 1,
    held_bytes: int = 0,
    together: int = 1,
    session: str = "",
) -> CallsRan:
    """What a worker reports of calls that ended well."""
    ran = calls, batch, run_s, peak_bytes, held_bytes, together
    return CallsRan(0, lease, *ran, [], session)


class InMemoryHosted(HostedModel):
    """One model in memory."""

    def __init__(self, runtime: "InMemoryRuntime", order: LoadOrder, number: int) -> None:
        self.order = order
        self.id = HostedId(f"worker-{number}")
        self.number = number
        self.host = runtime.host_of(order, number)
        self.memory_bytes = runtime.memory_bytes.get(order.model, order.total_bytes)
        self.overhead_bytes = runtime.overhead_bytes
        self.load_s = runtime.load_s
        now_s = asyncio.get_running_loop().time()
        self.load_spans = [LoadSpan("transfer", now_s - self.load_s, now_s)]
        self.closed = asyncio.get_running_loop().create_future()
        self.limit_bytes = order.limit_bytes
        self.together_bytes = order.together_bytes
        self.admitted: set[int] = set()
        self.parts: dict[int, set[str]] = {}  # of divided leases
        self.holders: dict[int, str] = {}  # by lease, whose calls may run
        self.hangs = False  # as a stopped process does
        self.carry_out: list[CarryOut] = []  # orders of features
        self.say: list[Callable[[], None]] = []  # what features have not reported yet
        self.channels: list[tuple[str, str, socket.socket]] = []
        self.asked_computed: list[int] = []  # under which leases
        self.terms: dict[int, LeaseTerms] = {}
        self._runtime = runtime
        self._calls: dict[int, asyncio.Event] = {}
        self._since_s: dict[int, float] = {}  # of leases with a call under way

    @property
    def pid(self) -> int:
        assert self.host is not None, "a test took its process away"
        return self.host.pid

    def admit(self, admission: Admission) -> None:
        lease, owner, _, divided, terms = admission
        self.admitted.add(lease)
        if divided:
            self.parts.setdefault(lease, set()).add(owner)
        self.terms[lease] = terms
        self.holders[lease] = owner

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        self.admitted.discard(lease)
        ended = asyncio.Event() if self.hangs else self._calls.get(lease)
        if ended is None or self.closed.done():
            return
        waiting = asyncio.ensure_future(ended.wait())
        either: list[asyncio.Future[Any]] = [waiting, self.closed]
        done, _ = await asyncio.wait(either, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not done:
            self.die("a call outlived its lease")

    def _say_computed(self, lease: int) -> None:
        """A worker says for how long calls ran since it last said so."""
        now_s = asyncio.get_running_loop().time()
        since_s, self._since_s[lease] = self._since_s[lease], now_s
        if not self.closed.done():
            self._runtime.observer.computed(self, lease, now_s - since_s)

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        self.channels.append((session, function, end))

    def limit(self, limit_bytes: int, together_bytes: int = 0) -> None:
        self.limit_bytes, self.together_bytes = limit_bytes, together_bytes

    def send(
        self, order: WorkerOrder, descriptors: Sequence[int] = (), *, while_leaving: bool = False
    ) -> None:
        del while_leaving
        for carry_out in self.carry_out:
            carry_out(order, descriptors)

    def report(self, report: WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Report something about a feature at once."""
        for feature in self._runtime.observer.features:
            feature.reported(self, report, descriptors)

    async def heard(self) -> None:
        for say in self.say:
            say()

    def ask_computed(self, lease: int) -> None:
        self.asked_computed.append(lease)
        if lease in self._calls:
            self._say_computed(lease)
        elif not self.closed.done():
            self._runtime.observer.computed(self, lease, 0.0)

    async def unload(self) -> int:
        await asyncio.sleep(self._runtime.unload_s)
        self.vanish("unloaded")
        return self.memory_bytes

    async def empty(self) -> "InMemoryEmpty | None":
        if self._runtime.sharing(self) != [self]:
            await self.unload()
            return None
        await asyncio.sleep(self._runtime.empty_s)
        if self.closed.done():
            return None
        self.vanish("emptied")
        return self._runtime.keep(self)

    # -- what a test makes it do --------------------------------------------------------------

    async def call(
        self, lease: int, run_s: float = 0.01, need_bytes: int = 0, session: str = ""
    ) -> PressureAnswer | None:
        """One call, as a worker serves it; the relief where it needed one."""
        assert lease in self.admitted, f"lease {lease} is not in force"
        assert session in self.parts.get(lease, ("",)), f"lease {lease} is not {session}'s"
        ended = self._calls[lease] = asyncio.Event()
        self._since_s[lease] = asyncio.get_running_loop().time()
        relief = None
        if need_bytes > self.limit_bytes:
            relief = await self._runtime.observer.pressure(self, lease, need_bytes)
        if relief is None or relief.retry:
            await asyncio.sleep(run_s)
            self.memory_bytes = max(self.memory_bytes, need_bytes)
            if not self.closed.done():
                report = calls_ran(lease, 1, run_s, self.memory_bytes, session=session)
                self._runtime.observer.ran(self, report)
        self._say_computed(lease)
        ended.set()
        del self._calls[lease]
        return relief

    def die(self, cause: str = "killed") -> None:
        """End the process without an order, with every model that it runs."""
        for hosted in self._runtime.sharing(self):
            hosted.vanish(cause)
            self._runtime.observer.died(hosted, cause)

    def die_unseen(self) -> None:
        """End the process while it carries out an order, whose answer says so."""
        self.vanish("killed")

    def vanish(self, cause: str) -> None:
        if not self.closed.done():
            self.closed.set_result(cause)
            for _, _, end in self.channels:
                end.close()
            for ended in self._calls.values():
                ended.set()


class InMemoryEmpty(EmptyHost):
    """A process that a model has left."""

    def __init__(self, runtime: "InMemoryRuntime", left_by: InMemoryHosted) -> None:
        self.tenant = left_by.order.tenant
        self.host = left_by.host
        self.memory_bytes = runtime.context_bytes
        self.closed = asyncio.get_running_loop().create_future()
        self._runtime = runtime

    async def end(self) -> None:
        await asyncio.sleep(self._runtime.unload_s)
        if not self.closed.done():
            self.closed.set_result("ended")

    def die(self, cause: str = "killed") -> None:
        """End without an order."""
        self.closed.set_result(cause)
        self._runtime.observer.context_lost(self, cause)


class InMemoryRuntime:
    """Loads take `load_s`, in an emptied process `reload_s`; models in `failing` cannot be loaded.

    With `shared`, all models of a GPU and tenant run in one process, which ends with them all.
    """

    def __init__(self, observer: Observer, *, shared: bool = False) -> None:
        self.observer = observer
        self.shared = shared
        self.load_s = 1.0
        self.reload_s = 0.1
        self.unload_s = 0.05
        self.empty_s = 0.05
        self.context_bytes = 0  # of a process without a model
        self.overhead_bytes = 0  # of a process, as it reports it
        self.memory_bytes: dict[str, int] = {}
        self.failing: dict[str, LoadFailure] = {}
        self.hosted: list[InMemoryHosted] = []
        self.empty: list[InMemoryEmpty] = []
        self.orders: list[LoadOrder] = []
        self.prepared = 0  # so many times
        self._numbers = count(1)
        self._processes: dict[tuple[str, str], HostProcess] = {}

    def host_of(self, order: LoadOrder, number: int) -> HostProcess:
        """The process that runs the model of this order."""
        if not self.shared:
            return HostProcess(number)
        return self._processes.setdefault((order.gpu, order.tenant), HostProcess(number))

    def sharing(self, hosted: InMemoryHosted) -> list[InMemoryHosted]:
        """The models that this one's process runs, itself included."""
        there = [found for found in self.hosted if not found.closed.done()]
        return [found for found in there if found.host == hosted.host]

    def prepare(self) -> None:
        self.prepared += 1

    def hosting(self, wish: str, model: str) -> str:  # noqa: ARG002 - each as it is wished
        return wish or PROCESS

    async def load(self, order: LoadOrder) -> InMemoryHosted:
        self.orders.append(order)
        taken = self._take(order)
        await asyncio.sleep(self.load_s if taken is None else self.reload_s)
        if order.model in self.failing:
            raise self.failing[order.model]
        hosted = InMemoryHosted(self, order, next(self._numbers))
        if taken is not None:
            hosted.host = taken.host
        self.hosted.append(hosted)
        return hosted

    async def close(self) -> None:
        for hosted in self.hosted:
            await hosted.unload()
        for empty in self.empty:
            await empty.end()

    def keep(self, left_by: InMemoryHosted) -> InMemoryEmpty:
        """What is left of a process when its model leaves it."""
        self.empty.append(InMemoryEmpty(self, left_by))
        return self.empty[-1]

    def _take(self, order: LoadOrder) -> InMemoryEmpty | None:
        """The empty process of the order, if it is there."""
        taken = next((found for found in self.empty if found is order.emptied), None)
        if taken is None or taken.closed.done():
            return None
        assert taken.tenant == order.tenant
        taken.closed.set_result("taken")
        return taken

    def of(self, model: str) -> InMemoryHosted:
        """The model's latest process, which must be there."""
        (hosted,) = [
            found for found in self.hosted if found.order.model == model and not found.closed.done()
        ]
        return hosted
