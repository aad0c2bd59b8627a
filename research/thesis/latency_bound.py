"""A lower bound on average latency that no policy can beat, clairvoyant ones included.

It assumes what holds for every policy here: GPUs start empty; a GPU runs one request at a time
without interrupting it; a model is loaded only by a request that has arrived, on its GPU and right
before its inference, and stays in memory that nothing else uses. Proofs: docs/decisions/0004.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from cache_manager.model.ids import MIB, ModelId
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.workload import MINUTE_S, Workload

# The price of keeping the largest model, in seconds of waiting a second; at most a half, by proof.
_PRICES = (0.0, 1 / 256, 1 / 128, 1 / 64, 1 / 32, 3 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
_FIRST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class ModelRequests:
    """All requests for one model, in the order of their arrival."""

    arrivals_s: Sequence[float]
    run_s: float
    load_s: float
    memory_bytes: int


def least_waiting(demands: Sequence[ModelRequests], memory_bytes: int) -> float:
    """No schedule in this much memory has less waiting and loading in sum (seconds)."""
    first_s = min(demand.arrivals_s[0] for demand in demands)
    last_s = max(demand.arrivals_s[-1] for demand in demands)
    largest = max(demand.memory_bytes for demand in demands)
    if not largest:
        return sum(_cheapest(demand, 0.0, last_s) for demand in demands)
    best = float("-inf")
    for price in _PRICES:
        paid = sum(_cheapest(d, price * d.memory_bytes / largest, last_s) for d in demands)
        bound = paid - price * memory_bytes / largest * (last_s - first_s)
        if bound < best:
            break  # the bound is concave in the price
        best = bound
    return best


def _cheapest(demand: ModelRequests, price: float, end_s: float) -> float:
    """The least cost of serving these requests by copies that cost `price` a second until then.

    A cover in which some copy's next request comes more than `width` requests later has more than
    `width` loads, and none of those is free.
    """
    width = _FIRST_WIDTH
    while True:
        cost = _cheapest_within(demand, price, end_s, width)
        if width >= len(demand.arrivals_s) or cost <= width * (1.0 - price) * demand.load_s:
            return cost
        width *= 2


def _cheapest_within(demand: ModelRequests, price: float, end_s: float, width: int) -> float:
    """Request by request; state i: only the first i requests may have a successor on their copy.

    Copies take their requests in the order of arrival, and so do their next ones (first come,
    first followed), so that each successor's predecessor is later than the one before.
    """
    rest = 1.0 - price
    warm_s = demand.arrivals_s[0] + demand.load_s + demand.run_s
    costs = [0.0]
    oldest = 0
    free: list[float] = []
    for place, arrived_s in enumerate(demand.arrivals_s):
        load = rest * demand.load_s + price * min(demand.load_s, end_s - arrived_s)
        start = rest * max(arrived_s, warm_s)
        follow = (price - rest) * arrived_s
        best = before = float("inf")
        following = []
        for state, cost in enumerate(costs, oldest):
            best = min(best, cost + load)
            if before < best:
                freed_s = free[state - 1]
                held = price * demand.arrivals_s[state - 1]
                best = min(best, before + max(start, rest * freed_s) + follow - held)
            before = cost
            following.append(best)
        following.append(best)
        if place + 1 - oldest > width:
            following.pop(0)
            oldest += 1
        costs = following
        least_wait_s = min(demand.load_s, max(0.0, warm_s - arrived_s))
        free.append(arrived_s + least_wait_s + demand.run_s)
    return costs[-1]


_EARLY_CUTS_S = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 40.0)
_COLD_FOR_S = (3.0, 10.0)
_LONGEST_PART = 10
# Time of the memory-aware bound grows with the square of the number of requests for a model.
_MOST_FOR_COPIES = 2_000
_ROUNDING_S = 1e-12


@dataclass(frozen=True, slots=True)
class _Job:
    """One request: its arrival, the seconds of its inference, and of its model's load."""

    model: ModelId
    arrived_s: float
    run_s: float
    load_s: float
    memory_bytes: int
    first_s: float
    is_first: bool

    @property
    def ready_s(self) -> float:
        """The earliest start of the inference: after its load, or after the loader's inference."""
        served_s = self.first_s + self.load_s + self.run_s
        return self.arrived_s + min(self.load_s, max(0.0, served_s - self.arrived_s))

    def is_cold(self, cold_for_s: float, part_start_s: float) -> bool:
        """Whether the job arrived soon after its model's first request, in the same part."""
        return self.first_s >= part_start_s and self.arrived_s <= self.first_s + cold_for_s


def average_latency_bound(workload: Workload, hardware: Hardware) -> float:
    """No schedule of this workload on these GPUs has a lower average latency (seconds)."""
    jobs = _jobs(workload, hardware)
    if not jobs:
        return 0.0
    loads_s = sum(job.load_s for job in jobs if job.is_first)
    holding_s = _first_come(jobs, [job.arrived_s for job in jobs], hardware.gpus)
    return max(loads_s + holding_s, _best_partition(jobs, hardware)) / len(jobs)


def _jobs(workload: Workload, hardware: Hardware) -> list[_Job]:
    models = {model.id: model for model in workload.models}
    first_s: dict[ModelId, float] = {}
    jobs = []
    for arrived_s, model in workload.arrivals:
        is_first = model not in first_s
        began_s = first_s.setdefault(model, arrived_s)
        run_s = models[model].run_s + hardware.overhead_s
        load_s, memory_bytes = models[model].load_s, models[model].memory_bytes
        jobs.append(_Job(model, arrived_s, run_s, load_s, memory_bytes, began_s, is_first))
    return jobs


def _best_partition(jobs: Sequence[_Job], hardware: Hardware) -> float:
    """Cut the requests by arrival time so that the bounds of the parts sum to the most."""
    cuts = _cuts(jobs)
    best = [0.0] + [float("-inf")] * (len(cuts) - 1)
    longest_for_copies = bisect_right(cuts, _MOST_FOR_COPIES) - 1
    for end in range(1, len(cuts)):
        for start in range(max(0, end - _LONGEST_PART), end):
            part = jobs[cuts[start] : cuts[end]]
            best[end] = max(best[end], best[start] + _part_bound(part, hardware.gpus))
        if end == longest_for_copies:
            best[end] = max(best[end], _by_copies(jobs[: cuts[end]], hardware, best[end]))
    return best[-1]


def _cuts(jobs: Sequence[_Job]) -> list[int]:
    arrivals = [job.arrived_s for job in jobs]
    times = list(_EARLY_CUTS_S)
    while times[-1] + MINUTE_S <= arrivals[-1]:
        times.append((times[-1] // MINUTE_S + 1) * MINUTE_S)
    places = {bisect_left(arrivals, time_s - 1e-9) for time_s in times}
    return sorted(places | {len(jobs)})


def _by_copies(first_jobs: Sequence[_Job], hardware: Hardware, to_beat: float) -> float:
    """Seconds of these first requests when only memory limits the copies of models."""
    if sum(job.run_s + job.load_s for job in first_jobs) <= to_beat:
        return to_beat
    by_model: dict[ModelId, list[_Job]] = {}
    for job in first_jobs:
        by_model.setdefault(job.model, []).append(job)
    demands = [
        ModelRequests(
            [job.arrived_s for job in like], like[0].run_s, like[0].load_s, like[0].memory_bytes
        )
        for like in by_model.values()
    ]
    memory_bytes = hardware.gpus * hardware.gpu_memory_mb * MIB
    return sum(job.run_s for job in first_jobs) + least_waiting(demands, memory_bytes)


def _part_bound(part: Sequence[_Job], gpus: int) -> float:
    """The largest of several bounds on the sum of these requests' latencies."""
    return max(
        _first_come(part, sorted(job.ready_s for job in part), gpus),
        _mean_busy_times(part, gpus, cold_for_s=-1.0),
        *(_mean_busy_times(part, gpus, cold_for_s) for cold_for_s in _COLD_FOR_S),
    )


def _first_come(part: Sequence[_Job], ready_s: Sequence[float], gpus: int) -> float:
    """Each job holds a GPU as long as the shortest job: first come, first served is best."""
    shortest_s = min(job.run_s for job in part)
    free_s = [ready_s[0]] * gpus
    total_s = sum(job.run_s - job.arrived_s for job in part)
    for earliest_s in ready_s:
        start_s = max(free_s[0], earliest_s)
        heapreplace(free_s, start_s + shortest_s)
        total_s += start_s
    return total_s


def _mean_busy_times(part: Sequence[_Job], gpus: int, cold_for_s: float) -> float:
    """One machine as fast as all GPUs, interruptible; each model's load precedes its jobs."""
    cold = [job.is_cold(cold_for_s, part[0].arrived_s) for job in part]
    numbers = Counter(job.model for job, is_cold in zip(part, cold, strict=True) if is_cold)
    total_s = 0.0
    work: list[tuple[float, float, float]] = []
    loads: dict[ModelId, _Job] = {}
    for job, is_cold in zip(part, cold, strict=True):
        share = _share(job, numbers) if is_cold else 0.0
        work.append((job.ready_s, 1.0 - share, job.run_s))
        total_s += job.run_s / 2 - job.arrived_s + share * (job.load_s + job.run_s) / 2
        if is_cold:
            loads.setdefault(job.model, job)
    for model, job in loads.items():
        work.append((job.first_s, numbers[model] * _share(job, numbers), job.load_s))
    return total_s + _least_weighted_mean_busy_time(work, gpus)


def _share(job: _Job, numbers: Counter[ModelId]) -> float:
    """The share of its requests' weight that a model's load gets: in proportion to its length."""
    work_s = job.load_s + numbers[job.model] * job.run_s
    return job.load_s / work_s if work_s > 0.0 else 0.0


def _least_weighted_mean_busy_time(work: list[tuple[float, float, float]], speed: int) -> float:
    """For (release, weight, size) on one machine of this speed: by weight/size, interruptible."""
    pending = sorted(item for item in work if item[2] > 0.0)
    left = [size / speed for _, _, size in pending]
    ready: list[tuple[float, int]] = []
    now = 0.0
    total = sum(weight * release_s for release_s, weight, size in work if size <= 0.0)
    arriving = 0
    while arriving < len(pending) or ready:
        if not ready:
            now = max(now, pending[arriving][0])
        while arriving < len(pending) and pending[arriving][0] <= now:
            _, weight, size = pending[arriving]
            heappush(ready, (-weight / size, arriving))
            arriving += 1
        chosen = ready[0][1]
        _, weight, size = pending[chosen]
        slice_s = left[chosen]
        if arriving < len(pending):
            slice_s = min(slice_s, pending[arriving][0] - now)
        total += weight * (slice_s * speed / size) * (now + slice_s / 2)
        left[chosen] -= slice_s
        now += slice_s
        if left[chosen] <= _ROUNDING_S:
            heappop(ready)
    return total
