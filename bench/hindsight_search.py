"""Schedules made in hindsight: models placed for good, requests dispatched, both by annealing."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp
from random import Random

from cache_manager.model import MIB
from scheduler.sim.engine import Hardware
from scheduler.sim.workload import Workload

PLACEMENT_STEPS = 30_000
DISPATCH_STEPS = 400_000
_EXTRA_COPIES_TRIED = 30


@dataclass(frozen=True, slots=True)
class Case:
    """Requests by number: when each came, what it asks for and how long it runs."""

    arrived_s: Sequence[float]
    models: Sequence[int]
    run_s: Sequence[float]
    memory_bytes: Sequence[int]
    hardware: Hardware


@dataclass(slots=True)
class Placement:
    """Which models each GPU holds, for good."""

    held: list[list[int]]
    free_bytes: list[int]
    copies: list[int]

    def copy(self) -> "Placement":
        return Placement([list(held) for held in self.held], [*self.free_bytes], [*self.copies])

    def fits(self, gpu: int, model: int, memory_bytes: Sequence[int]) -> bool:
        return memory_bytes[model] <= self.free_bytes[gpu] and model not in self.held[gpu]

    def add(self, gpu: int, model: int, memory_bytes: Sequence[int]) -> None:
        self.held[gpu].append(model)
        self.free_bytes[gpu] -= memory_bytes[model]
        self.copies[model] += 1

    def drop(self, gpu: int, place: int, memory_bytes: Sequence[int]) -> int:
        model = self.held[gpu].pop(place)
        self.free_bytes[gpu] += memory_bytes[model]
        self.copies[model] -= 1
        return model


def case_of(workload: Workload, hardware: Hardware) -> Case:
    """A workload on a cluster in which no load takes time."""
    numbers = {model.id: number for number, model in enumerate(workload.models)}
    models = [numbers[name] for _, name in workload.arrivals]
    return Case(
        [arrived_s for arrived_s, _ in workload.arrivals],
        models,
        [workload.models[model].run_s + hardware.overhead_s for model in models],
        [model.memory_bytes for model in workload.models],
        hardware,
    )


# -- which GPU holds what ---------------------------------------------------------------------


def serve(case: Case, placement: Placement) -> tuple[float, list[list[int]]]:
    """First come, first served on a fixed placement: the average latency, each GPU's order."""
    held = placement.held
    holders: list[list[int]] = [[] for _ in case.memory_bytes]
    for gpu in sorted(range(len(held)), key=lambda gpu: len(held[gpu])):
        for model in held[gpu]:
            holders[model].append(gpu)
    waiting: list[deque[int]] = [deque() for _ in case.memory_bytes]
    busy = [False] * len(held)
    orders: list[list[int]] = [[] for _ in held]
    ends: list[tuple[float, int]] = []
    total_s = 0.0

    def start(gpu: int, request: int, now: float) -> None:
        nonlocal total_s
        done_s = now + case.run_s[request]
        total_s += done_s - case.arrived_s[request]
        busy[gpu] = True
        orders[gpu].append(request)
        heappush(ends, (done_s, gpu))

    def free_next() -> None:
        now, gpu = heappop(ends)
        busy[gpu] = False
        queues = [waiting[model] for model in held[gpu] if waiting[model]]
        if queues:
            start(gpu, min(queues, key=_first).popleft(), now)

    for request, (arrived_s, model) in enumerate(zip(case.arrived_s, case.models, strict=True)):
        while ends and ends[0][0] <= arrived_s:
            free_next()
        idle = next((gpu for gpu in holders[model] if not busy[gpu]), None)
        if idle is None:
            waiting[model].append(request)
        else:
            start(idle, request, arrived_s)
    while ends:
        free_next()
    return total_s / len(case.models), orders


def _first(queue: deque[int]) -> int:
    return queue[0]


def best_placement(case: Case, random: Random) -> Placement:
    """The best one found for these very requests."""
    current = _first_fit(case)
    _fill(case, current, random)
    current_s, _ = serve(case, current)
    best, best_s = current, current_s
    for step in range(PLACEMENT_STEPS):
        changed = current.copy()
        if not _change(case, changed, random):
            continue
        _fill(case, changed, random)
        changed_s, _ = serve(case, changed)
        heat_s = 0.01 * best_s * (1 - step / PLACEMENT_STEPS) + 1e-9
        if changed_s <= current_s or random.random() < exp((current_s - changed_s) / heat_s):
            current, current_s = changed, changed_s
            if current_s < best_s:
                best, best_s = current, current_s
    return best


def _first_fit(case: Case) -> Placement:
    """One copy of each model, the largest first, each where least room would be left."""
    memory = case.memory_bytes
    gpus = range(case.hardware.gpus)
    capacity = case.hardware.gpu_memory_mb * MIB
    placement = Placement([[] for _ in gpus], [capacity for _ in gpus], [0 for _ in memory])
    for model in sorted(range(len(memory)), key=lambda model: -memory[model]):
        fitting = [gpu for gpu in gpus if placement.fits(gpu, model, memory)]
        placement.add(min(fitting, key=lambda gpu: placement.free_bytes[gpu]), model, memory)
    return placement


def _fill(case: Case, placement: Placement, random: Random) -> None:
    """Further copies wherever there is room, of models as often as they are asked for."""
    for _ in range(_EXTRA_COPIES_TRIED):
        gpu = random.randrange(len(placement.held))
        model = case.models[random.randrange(len(case.models))]
        if placement.fits(gpu, model, case.memory_bytes):
            placement.add(gpu, model, case.memory_bytes)


def _change(case: Case, placement: Placement, random: Random) -> bool:
    """Drop a copy, move one, or exchange some; False where a model would be left without."""
    memory = case.memory_bytes
    here, there = random.sample(range(len(placement.held)), 2)
    if not placement.held[here]:
        return False
    model = placement.drop(here, random.randrange(len(placement.held[here])), memory)
    if random.random() < 1 / 3:
        return placement.copies[model] > 0
    if model in placement.held[there]:
        return False
    while memory[model] > placement.free_bytes[there]:
        place = random.randrange(len(placement.held[there]))
        displaced = placement.drop(there, place, memory)
        if placement.fits(here, displaced, memory):
            placement.add(here, displaced, memory)
    placement.add(there, model, memory)
    return all(placement.copies)


# -- which copy serves which request -----------------------------------------------------------


class Dispatching:
    """Who is served where and in which order; every GPU starts each request as early as it can."""

    def __init__(self, case: Case, orders: list[list[int]]) -> None:
        self._case = case
        self._orders = orders
        self._done_s = [0.0] * len(case.models)
        self._gpu = [0] * len(case.models)
        for gpu, order in enumerate(orders):
            for request in order:
                self._gpu[request] = gpu
            for request, done_s in self._retimed(order, 0, len(order)):
                self._done_s[request] = done_s

    def average_s(self) -> float:
        """The average latency."""
        return (sum(self._done_s) - sum(self._case.arrived_s)) / len(self._done_s)

    def move(self, request: int, gpu: int, earlier: int, worth_s: float) -> None:
        """To that GPU, before so many of those that came earlier, if that costs no more than so."""
        here = self._gpu[request]
        if gpu == here:
            self._swap(request, worth_s)
            return
        left, entered = [*self._orders[here]], [*self._orders[gpu]]
        place = left.index(request)
        del left[place]
        entry = max(0, _place(entered, request) - earlier)
        entered.insert(entry, request)
        later = self._retimed(left, place, 0) + self._retimed(entered, entry, 1)
        if self._accepted(later, worth_s):
            self._orders[here], self._orders[gpu] = left, entered
            self._gpu[request] = gpu

    def _swap(self, request: int, worth_s: float) -> None:
        """Exchange it with the next one on its GPU."""
        here = self._gpu[request]
        order = [*self._orders[here]]
        place = order.index(request)
        if place + 1 == len(order):
            return
        order[place], order[place + 1] = order[place + 1], order[place]
        if self._accepted(self._retimed(order, place, 2), worth_s):
            self._orders[here] = order

    def _accepted(self, later: list[tuple[int, float]], worth_s: float) -> bool:
        if sum(done_s - self._done_s[request] for request, done_s in later) > worth_s:
            return False
        for request, done_s in later:
            self._done_s[request] = done_s
        return True

    def _retimed(self, order: list[int], place: int, at_least: int) -> list[tuple[int, float]]:
        """New ends from this place on, up to where nothing changes any more."""
        now = self._done_s[order[place - 1]] if place else 0.0
        later = []
        for index in range(place, len(order)):
            request = order[index]
            now = max(now, self._case.arrived_s[request]) + self._case.run_s[request]
            if index - place >= at_least and now == self._done_s[request]:
                break
            later.append((request, now))
        return later


def _place(order: list[int], request: int) -> int:
    """Where it would go by arrival, in an order that is nearly that of arrival."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if order[middle] < request:
            low = middle + 1
        else:
            high = middle
    return low


def best_dispatch(
    case: Case, placement: Placement, orders: list[list[int]], random: Random
) -> float:
    """The least average latency found, starting from these orders, which are used up."""
    dispatching = Dispatching(case, orders)
    best_s = dispatching.average_s()
    holders: list[list[int]] = [[] for _ in case.memory_bytes]
    for gpu, held in enumerate(placement.held):
        for model in held:
            holders[model].append(gpu)
    for step in range(DISPATCH_STEPS):
        request = random.randrange(len(case.models))
        gpu = random.choice(holders[case.models[request]])
        heat_s = 0.3 * (1 - step / DISPATCH_STEPS)
        dispatching.move(request, gpu, random.randrange(3), heat_s * random.expovariate(1.0))
        if step % 10_000 == 0:
            best_s = min(best_s, dispatching.average_s())
    return min(best_s, dispatching.average_s())
