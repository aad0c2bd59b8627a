"""Callers who want leases of a live cluster all the time, and what must hold of all that they got.

They are on a thread of their own, so that a test can break things meanwhile, one after the other.
"""

import asyncio
import secrets
import struct
import threading
import time
from asyncio import CancelledError
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import NamedTuple

from gpu_manager.node.leases import MOST_HALVINGS, EndReason, LeaseTimes
from scheduler.model.values import Request, RequestId
from scheduler.wire import caller_stream
from tests.kit.engines.real_etcd import LOG
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.processes.journals import Ended, Granted
from tests.kit.processes.live_cluster import FUNCTION, SCHEDULERS, LiveCluster
from tests.kit.waiting import wait_until
from tests.kit.worlds.joined_manager import model_of
from tests.kit.worlds.waiting_caller import WaitingCaller
from torch_shim.errors import RemoteFailure

_HOLD_S = 0.02
_CALLERS_OF_EACH = 3
_END_S = 60.0
_LEAST_CLAIM_S = LeaseTimes().claim_s / (1 << MOST_HALVINGS)
_ENDED_S = 60.0  # half of the time after which a lease ends that nobody has claimed


class Served(NamedTuple):
    """A request that was answered with a lease; times are the wall clock's."""

    request: RequestId
    lease: int
    term: int
    node: str
    hit: bool
    asked_s: float
    granted_s: float
    released_s: float
    computed: bool


class Callers:
    """Some only hold their lease, as a function before its first call; some compute under it."""

    def __init__(self, cluster: LiveCluster, images: Sequence[SealedWeights]) -> None:
        self.served: list[Served] = []
        self.failed: list[str] = []
        self.late: list[str] = []
        self.begun = 0
        self._cluster = cluster
        self._images = images
        self._name = secrets.token_hex(4)
        self._stopping = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="callers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing any more, and wait for every answer."""
        self._stopping.set()
        self._thread.join(_END_S)
        waiting = self.begun - len(self.served) - len(self.failed)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._give_up)
            self._thread.join(_END_S)
            raise AssertionError(f"{waiting} callers wait for ever")

    def more(self, number: int = 30, *, after_term: int = 0, elsewhere_than: str = "") -> float:
        """Wait until so many more were served in later terms, or on other nodes; the seconds."""
        begin = len(self.served)

        def enough() -> bool:
            assert not self.failed, self.failed
            found = [each for each in self.served[begin:] if each.node != elsewhere_than]
            return sum(each.term > after_term for each in found) >= number

        return wait_until(enough, "so many more were served")

    def longest_wait_s(self) -> float:
        """From a request to its answer."""
        return max(each.granted_s - each.asked_s for each in self.served)

    # -- on their thread --------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(CancelledError):
            runner.run(self._call_all())

    def _give_up(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _call_all(self) -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for first in SCHEDULERS:
                client = await stack.enter_async_context(self._cluster.client(first=first))
                for number in range(_CALLERS_OF_EACH):
                    name = f"{self._name}-{first}-{number}"
                    tasks.create_task(self._call(client, name, computes=number == 0))

    async def _call(self, client: WaitingCaller, name: str, *, computes: bool) -> None:
        functions: dict[str, FunctionClient] = {}
        try:
            for number in count():
                if self._stopping.is_set():
                    return
                image = self._images[number % len(self._images)]
                request = Request(RequestId(f"{name}-{number}"), str(FUNCTION), (model_of(image),))
                self.begun += 1
                try:
                    await self._served(client, request, image, functions if computes else None)
                except Exception as error:  # noqa: BLE001 - the test checks every one
                    self.failed.append(f"{request.id}: {error!r}")
        finally:
            for function in functions.values():
                function.close()

    async def _served(
        self,
        client: WaitingCaller,
        request: Request,
        image: SealedWeights,
        functions: dict[str, FunctionClient] | None,
    ) -> None:
        asked_s = time.time()
        granted = await client.acquire(request)
        granted_s = time.time()
        if functions is None:
            await asyncio.sleep(_HOLD_S)
        else:
            await asyncio.to_thread(self._compute, granted, image, functions)
        released_s = time.time()
        client.release(granted.placement.lease)
        placement = granted.placement
        self.served.append(
            Served(
                *(request.id, placement.lease, granted.term, placement.node, placement.hit),
                *(asked_s, granted_s, released_s, functions is not None),
            )
        )

    def _compute(
        self,
        granted: caller_stream.Granted,
        image: SealedWeights,
        functions: dict[str, FunctionClient],
    ) -> None:
        """As a function does: show the token, and call.

        A lease that the leader gave while its nodes went to another one is not in force; what a
        shim does then is not what these tests are about.
        """
        node = granted.placement.node
        if node not in functions:
            functions[node] = self._cluster.function(node)
        it = functions[node]
        try:
            it.acquire(image, token=granted.token)
        except RemoteFailure as failure:
            self.late.append(f"{granted.placement.lease}: {failure}")
            return
        if it.lease == granted.placement.lease:
            (first,) = struct.unpack_from("f", image.content)
            assert it.call(image) == [first + 1.0] * 4
        else:
            self.late.append(f"{granted.placement.lease}: not in force")
        it.release()


@asynccontextmanager
async def holding(
    cluster: LiveCluster, image: SealedWeights, *, on: str = ""
) -> AsyncIterator[caller_stream.Granted]:
    """A lease, on this very node if one is named: one that has the model, or it takes for ever.

    A second after this context it ends, as its caller is gone.
    """
    async with cluster.client() as client:
        for number in count():
            request = RequestId(f"{secrets.token_hex(4)}-{number}")
            granted = await client.acquire(Request(request, str(FUNCTION), (model_of(image),)))
            if granted.placement.node == on or not on:
                yield granted
                return
            client.release(granted.placement.lease)


@contextmanager
def calling(cluster: LiveCluster, images: Sequence[SealedWeights]) -> Iterator[Callers]:
    """Callers at work, some of whom were served already; all have their answer at the end."""
    callers = Callers(cluster, images)
    callers.start()
    try:
        callers.more(10)
        yield callers
    finally:
        callers.stop()


def check(
    cluster: LiveCluster, callers: Callers, *, told_to_end: str = "", parted: bool = False
) -> None:
    """Nobody was lost, no slot was given twice, no lease was taken away, nothing was evicted.

    A node that was asked to end takes back leases that no function has claimed, as any does where
    a caller takes its time. If a node and its leader were `parted`, the node may lack a lease, and
    a request may have had another one.
    """
    assert callers.failed == []
    answers = Counter(each.request for each in callers.served)
    assert (len(answers), answers.total()) == (callers.begun, callers.begun)
    with suppress(AssertionError):
        wait_until(
            lambda: not cluster.journal().in_force, "no lease is in force", within_s=_ENDED_S
        )
    journal = cluster.journal()
    of = {each.lease: each for each in callers.served}
    assert [(granted, of.get(granted.lease)) for granted in journal.in_force] == []
    assert journal.wrong == []
    assert journal.came_back == []
    given = {name: leases for name, leases in journal.leases_of().items() if name in answers}
    if parted:
        twice = sum(len(leases) > 1 for leases in given.values())
        LOG.info("%d leases not heard of, %d requests with two", len(answers) - len(given), twice)
    else:
        assert given == {each.request: [each.lease] for each in callers.served}
        assert callers.late == []
    for each in callers.served:
        ended = journal.ended.get(each.lease)
        if ended is not None and not each.computed and each.node != told_to_end:
            assert _in_its_time(journal.granted[each.lease], ended, each), f"{ended} with {each}"
    for node in cluster.nodes.keys() - {told_to_end}:
        came = {model for model, gpu in journal.resident if gpu.startswith(f"{node}/")}
        found = cluster.residents(node)
        assert found == came, f"{node} has {found}, and {came} came and did not leave"


def _in_its_time(granted: Granted, ended: Ended, served: Served) -> bool:
    """Whether a lease that nobody claims ended with its caller's release, or was in force for long.

    A caller may hear of its lease late, or stand still while it holds it.
    """
    if ended.at_s >= served.released_s - 0.002:
        return True
    return ended.why == EndReason.UNCLAIMED and ended.at_s - granted.at_s >= _LEAST_CLAIM_S
