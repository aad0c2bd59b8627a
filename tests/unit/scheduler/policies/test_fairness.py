"""No request is overtaken more often than the O3 limit allows.

Told from outside, on GPUs of one size with one slot each, so that every idle GPU could take every
request: a request is overtaken when one that arrived later leaves the global queue, to a GPU or to
a local queue, while it stays. Algorithm 7 lets that happen in one place only, its first scan, when
a hit lies further back. Everybody in front of the hit has fewer visits than the limit then (who has
more went somewhere before the hit was reached) and gets one more; the second scan and those at
the limit go strictly in order. So each is overtaken at most `limit` times, and never with a limit
of 0. Who comes back from a lost GPU keeps the visits of before, which can only lower the number.
"""

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given

from cache_manager.model.ids import NodeId
from scheduler.composition import make_core
from scheduler.model.actions import Action, Dispatch, EnqueueLocally, Finish
from scheduler.model.events import (
    Event,
    GpuDraining,
    GpuJoined,
    GpuLost,
    NodeSilent,
    RequestArrived,
)
from scheduler.model.values import AfterLoss, RequestId, SlotId
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.core_world import World, placements
from tests.kit.cores.life_lengths import life_length
from tests.kit.cores.random_workloads import Operation, Workload, operations, random_operations

LIMITS = [
    ("lb", {}, 0),
    ("lalb", {}, 0),
    *(("lalbo3", {"o3_limit": limit}, limit) for limit in (0, 1, 3, 25)),
]
each_limit = pytest.mark.parametrize(("policy", "parameters", "limit"), LIMITS)


class GlobalQueue:
    """The requests in the global queue, by order of arrival, as far as events and actions show."""

    def __init__(self) -> None:
        self.order: dict[RequestId, tuple[float, int]] = {}
        self.waiting: set[RequestId] = set()
        self.local: dict[RequestId, SlotId] = {}
        self.running: dict[RequestId, SlotId] = {}
        self.overtaken: Counter[RequestId] = Counter()
        self.nodes: dict[SlotId, NodeId] = {}

    def happened(self, event: Event, now: float) -> None:
        if isinstance(event, RequestArrived):
            arrived_s = event.request.arrived_s
            place = now if arrived_s is None else min(now, arrived_s)
            self.order[event.request.id] = (place, len(self.order))
            self.waiting.add(event.request.id)
        elif isinstance(event, GpuJoined):
            self.nodes[SlotId(event.gpu.id)] = event.gpu.node
        elif isinstance(event, NodeSilent):
            for slot in [slot for slot, node in self.nodes.items() if node == event.node]:
                self._back(self.local, slot)
        elif isinstance(event, GpuDraining):
            self._back(self.local, SlotId(event.gpu))
        elif isinstance(event, GpuLost):
            self._back(self.local, SlotId(event.gpu))
            if event.running is AfterLoss.REQUEUE:
                self._back(self.running, SlotId(event.gpu))

    def _back(self, places: dict[RequestId, SlotId], slot: SlotId) -> None:
        for back in [each for each, there in places.items() if there == slot]:
            del places[back]
            self.waiting.add(back)

    def answered(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            for given in action.requests:
                if self.local.pop(given, None) is None:
                    self._leaves(given)
                self.running[given] = action.slot
        elif isinstance(action, EnqueueLocally):
            self._leaves(action.request)
            self.local[action.request] = action.slot
        elif isinstance(action, Finish):
            self.waiting.discard(action.request)
            self.local.pop(action.request, None)
            self.running.pop(action.request, None)

    def _leaves(self, left: RequestId) -> None:
        self.waiting.remove(left)
        mine = self.order[left]
        self.overtaken.update(each for each in self.waiting if self.order[each] < mine)


@each_limit
@given(operations=operations)
def test_request_is_overtaken_no_more_than_allowed_when_anything_happens(
    policy: str, parameters: Mapping[str, int], limit: int, operations: list[Operation]
) -> None:
    crowd: list[Operation] = [("arrive", n * 7, n * 5, 0) for n in range(15)]
    assert most_overtaken(policy, parameters, [*crowd, *operations]) <= limit


@each_limit
def test_request_is_overtaken_no_more_than_allowed_when_the_queue_is_long(
    policy: str, parameters: Mapping[str, int], limit: int
) -> None:
    random = Random(limit)
    kinds = ("arrive",) * 9 + ("due",) * 8 + ("lose", "join")
    crowd: list[Operation] = [("arrive", random.randrange(64), 1, 0) for _ in range(60)]
    life = [*crowd, *random_operations(random, life_length(2500), kinds)]
    assert most_overtaken(policy, parameters, life) <= limit


@each_limit
def test_request_is_overtaken_exactly_so_often_when_hits_keep_coming(
    policy: str, parameters: Mapping[str, int], limit: int
) -> None:
    world = World(a_core(policy, models=("bert", "cold"), parameters=parameters))
    world.arrive(request("first"), request("late", "cold"))
    world.arrive(*(request(f"hit{number}") for number in range(40)))
    served: list[str] = []
    while "late" not in served:
        served += [name for name, _ in placements(world.free("g0"))]
    assert served.index("late") == limit


def most_overtaken(policy: str, parameters: Mapping[str, int], operations: list[Operation]) -> int:
    """How often the request was overtaken that was overtaken most."""
    core = make_core(policy, parameters=parameters)
    workload = Workload(model_count=9, gpu_count=3, sizes_mb=(10000,))
    queue = GlobalQueue()
    for event in workload.setup():
        queue.happened(event, workload.now)
        core.handle(event, workload.now)
    for operation in operations:
        happened = workload.event(operation)
        if happened is None:
            continue
        queue.happened(happened, workload.now)
        for action in core.handle(happened, workload.now):
            queue.answered(action)
            workload.apply(action)
    return max(queue.overtaken.values(), default=0)
