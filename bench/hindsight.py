"""`python -m bench.hindsight`: how close to the lower bound a placement made in hindsight comes.

The lower bound lets models float from GPU to GPU. This bench searches a fixed placement for the
very requests to come, with its loads for free, and compares bound, placement and policy.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import compress
from math import exp
from random import Random
from statistics import fmean

from bench.measure.report import BenchReport
from cache_manager.model.ids import MIB
from research.thesis.latency_bound import average_latency_bound
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.model.actions import Action, Dispatch
from scheduler.model.events import Event, RequestArrived
from scheduler.model.values import RequestId
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.study import Traffic
from scheduler.sim.workload import MINUTE_S, Arrivals, Pattern, Workload

POLICY = "netgain"
SEED = 1
STEPS = 30_000
_EXTRA_COPIES_TRIED = 30

EXPLANATION = """
Average latency in seconds of the requests that arrive in minutes 2 to 6 of the thesis's workload
(12 GPUs of 7,982 MB, no overhead a request, seed {seed}).

- **bound**: `average_latency_bound` of these requests alone, every load free.
- **placed**: which GPU holds which models is annealed on this very workload ({steps:,} steps).
  All models are on their GPUs beforehand; nothing is loaded or evicted. A request goes to an idle
  GPU that holds its model, or else the first one waiting to the first such GPU that comes free.
- **{policy}**: the policy. It knows nothing beforehand, loads its models, and starts minute 2 with
  the state that minute 1 left on GPUs that were empty at first.

The bound is proven. **placed** shows how close a schedule comes that knows the future; it does not
show that no schedule is better: the search may be stuck, and a schedule that also loads and evicts
could beat a fixed placement, most of all where memory is short.

| arrivals | working set | bound | placed | {policy} | placed / bound | {policy} / bound |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def main() -> int:
    """Measure, print a table, and keep it when asked to."""
    parser = argparse.ArgumentParser(prog="bench.hindsight", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the search ({STEPS})")
    parser.add_argument("--keep", action="store_true", help="write to bench/results/ too")
    options = parser.parse_args()
    command = f"python -m bench.hindsight --steps {options.steps} --keep"
    report = BenchReport(f"{POLICY} and hindsight", command)
    report.add(EXPLANATION.format(policy=POLICY, seed=SEED, steps=options.steps))
    for arrivals in (Arrivals.UNIFORM, Arrivals.POISSON):
        for size in (15, 25, 35):
            report.add(_line(arrivals, size, options.steps))
    if options.keep:
        print(f"\n{report.keep('hindsight')}")
    return 0


def _line(arrivals: Arrivals, size: int, steps: int) -> str:
    hardware = Hardware()
    workload = Traffic(working_set=size, pattern=Pattern(arrivals)).build(SEED)
    late = _after_first_minute(workload)
    bound_s = average_latency_bound(late, hardware)
    placed_s = best_placement_s(requests_of(late, hardware), steps, Random(SEED))
    policy_s = _policy_s(workload, hardware)
    figures = (bound_s, placed_s, policy_s, placed_s / bound_s, policy_s / bound_s)
    return f"| {arrivals.value} | {size} | {' | '.join(f'{figure:.3f}' for figure in figures)} |"


def _after_first_minute(workload: Workload) -> Workload:
    """The requests that arrive after the first minute, with loads that take no time."""
    models = tuple(replace(model, load_s=0.0) for model in workload.models)
    return Workload(models, tuple(asked for asked in workload.arrivals if asked[0] >= MINUTE_S))


# -- the policy -----------------------------------------------------------------------------------


class LateCore:
    """A core, and of each request in the order of placement whether it came after the first minute.

    The engine notes their latencies in the same order.
    """

    def __init__(self, core: Core) -> None:
        self.placed_late: list[bool] = []
        self._core = core
        self._late: dict[RequestId, bool] = {}

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, RequestArrived):
            self._late[event.request.id] = now >= MINUTE_S
        actions = self._core.handle(event, now)
        for action in actions:
            if isinstance(action, Dispatch):
                self.placed_late += [self._late.pop(request) for request in action.requests]
        return actions


def _policy_s(workload: Workload, hardware: Hardware) -> float:
    """The policy's average latency of the requests after the first minute."""
    core = LateCore(make_core(POLICY))
    tally = Engine(core, hardware, workload).run().tally
    return fmean(compress(tally.latencies, core.placed_late))


# -- the placement --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by number: their arrivals, models and run times; the models' sizes; the cluster."""

    arrived_s: Sequence[float]
    models: Sequence[int]
    run_s: Sequence[float]
    memory_bytes: Sequence[int]
    hardware: Hardware


@dataclass(slots=True)
class FixedPlacement:
    """The models that each GPU holds all the time."""

    held: list[list[int]]
    free_bytes: list[int]
    copies: list[int]

    def copy(self) -> "FixedPlacement":
        """A placement that can be changed without changing this one."""
        held = [list(models) for models in self.held]
        return FixedPlacement(held, [*self.free_bytes], [*self.copies])

    def fits(self, gpu: int, model: int, memory_bytes: Sequence[int]) -> bool:
        """Whether a GPU has room for a model that it does not hold yet."""
        return memory_bytes[model] <= self.free_bytes[gpu] and model not in self.held[gpu]

    def add(self, gpu: int, model: int, memory_bytes: Sequence[int]) -> None:
        """Place a copy of a model on a GPU."""
        self.held[gpu].append(model)
        self.free_bytes[gpu] -= memory_bytes[model]
        self.copies[model] += 1

    def drop(self, gpu: int, place: int, memory_bytes: Sequence[int]) -> int:
        """Remove the copy at this place of a GPU; its model."""
        model = self.held[gpu].pop(place)
        self.free_bytes[gpu] += memory_bytes[model]
        self.copies[model] -= 1
        return model


def requests_of(workload: Workload, hardware: Hardware) -> Requests:
    """The requests of a workload on a cluster in which no load takes time."""
    numbers = {model.id: number for number, model in enumerate(workload.models)}
    models = [numbers[name] for _, name in workload.arrivals]
    return Requests(
        [arrived_s for arrived_s, _ in workload.arrivals],
        models,
        [workload.models[model].run_s + hardware.overhead_s for model in models],
        [model.memory_bytes for model in workload.models],
        hardware,
    )


def best_placement_s(requests: Requests, steps: int, random: Random) -> float:
    """The average latency with the best placement found, by simulated annealing."""
    current = _first_fit(requests)
    _fill(requests, current, random)
    best_s = current_s = average_latency_s(requests, current)
    for step in range(steps):
        changed = current.copy()
        if not _change(requests, changed, random):
            continue
        _fill(requests, changed, random)
        changed_s = average_latency_s(requests, changed)
        heat_s = 0.01 * best_s * (1 - step / steps) + 1e-9
        if changed_s <= current_s or random.random() < exp((current_s - changed_s) / heat_s):
            current, current_s = changed, changed_s
            best_s = min(best_s, current_s)
    return best_s


def average_latency_s(requests: Requests, placement: FixedPlacement) -> float:
    """The average latency on a fixed placement, first come, first served."""
    held = placement.held
    holders: list[list[int]] = [[] for _ in requests.memory_bytes]
    for gpu in sorted(range(len(held)), key=lambda gpu: len(held[gpu])):
        for model in held[gpu]:
            holders[model].append(gpu)
    waiting: list[deque[int]] = [deque() for _ in requests.memory_bytes]
    busy = [False] * len(held)
    ends: list[tuple[float, int]] = []
    total_s = 0.0

    def start(gpu: int, request: int, now: float) -> None:
        nonlocal total_s
        done_s = now + requests.run_s[request]
        total_s += done_s - requests.arrived_s[request]
        busy[gpu] = True
        heappush(ends, (done_s, gpu))

    def free_next() -> None:
        now, gpu = heappop(ends)
        busy[gpu] = False
        queues = [waiting[model] for model in held[gpu] if waiting[model]]
        if queues:
            start(gpu, min(queues, key=_first).popleft(), now)

    arrivals = zip(requests.arrived_s, requests.models, strict=True)
    for request, (arrived_s, model) in enumerate(arrivals):
        while ends and ends[0][0] <= arrived_s:
            free_next()
        idle = next((gpu for gpu in holders[model] if not busy[gpu]), None)
        if idle is None:
            waiting[model].append(request)
        else:
            start(idle, request, arrived_s)
    while ends:
        free_next()
    return total_s / len(requests.models)


def _first(queue: deque[int]) -> int:
    return queue[0]


def _first_fit(requests: Requests) -> FixedPlacement:
    """One copy of each model, the largest first, each where least room would be left."""
    memory = requests.memory_bytes
    gpus = range(requests.hardware.gpus)
    capacity = requests.hardware.gpu_memory_mb * MIB
    placement = FixedPlacement([[] for _ in gpus], [capacity for _ in gpus], [0 for _ in memory])
    for model in sorted(range(len(memory)), key=lambda model: -memory[model]):
        fitting = [gpu for gpu in gpus if placement.fits(gpu, model, memory)]
        placement.add(min(fitting, key=lambda gpu: placement.free_bytes[gpu]), model, memory)
    return placement


def _fill(requests: Requests, placement: FixedPlacement, random: Random) -> None:
    """Add copies wherever there is room, of each model as often as it is requested."""
    for _ in range(_EXTRA_COPIES_TRIED):
        gpu = random.randrange(len(placement.held))
        model = requests.models[random.randrange(len(requests.models))]
        if placement.fits(gpu, model, requests.memory_bytes):
            placement.add(gpu, model, requests.memory_bytes)


def _change(requests: Requests, placement: FixedPlacement, random: Random) -> bool:
    """Drop a copy, move one, or exchange some; False where a model would have no copy left."""
    memory = requests.memory_bytes
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


if __name__ == "__main__":
    sys.exit(main())
