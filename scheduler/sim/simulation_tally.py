"""Counts what a simulation does, and computes its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.values import RequestId


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures.

    `false_miss_ratio` is the share of misses while another GPU held the model, `duplicates` how
    many GPUs hold a model on average over the placements, `gpu_busy_ratio` the share of all GPU
    time spent on inference (loading a model computes nothing). Of the last two, the first counts a
    GPU that is still loading the model as not holding it, the second ends with the last minute in
    which requests arrive.
    """

    requests: int
    avg_latency_s: float
    latency_variance: float
    p50_s: float
    p95_s: float
    p99_s: float
    miss_ratio: float
    false_miss_ratio: float
    duplicates: dict[str, float]
    gpu_busy_ratio: float
    makespan_s: float
    loaded_false_miss_ratio: float
    arriving_busy_ratio: float


class SimulationTally:
    """Counts during the run; costs a few dictionary accesses a request."""

    def __init__(self, gpus: int, models: Sequence[ModelId], arriving_s: float = 0.0) -> None:
        self._gpus = gpus
        self._arriving_s = arriving_s
        self._arrived_s: dict[RequestId, float] = {}
        self.latencies: list[float] = []
        self._placements = 0
        self._misses = 0
        self._false_misses = 0
        self._loaded_false_misses = 0
        self._loaded_s: dict[ModelId, dict[GpuId, float]] = {model: {} for model in models}
        self._computing_s = 0.0
        self._computing_arriving_s = 0.0
        self._end_s = 0.0
        self._copies = dict.fromkeys(models, 0)
        self._copy_sums = dict.fromkeys(models, 0)
        self._copies_since = dict.fromkeys(models, 0)

    def arrived(self, request: RequestId, now: float) -> None:
        self._arrived_s[request] = now

    def prepared(self, action: Prepare) -> None:
        """Residency changes with the placement that is about to be counted."""
        for victim in action.victims:
            self.left(action.gpu, victim)
        for load in action.loads:
            self._change_copies(load.model, +1)

    def loads(self, gpu: GpuId, model: ModelId, done_s: float) -> None:
        self._loaded_s[model][gpu] = done_s

    def left(self, gpu: GpuId, model: ModelId) -> None:
        self._change_copies(model, -1)
        self._loaded_s[model].pop(gpu, None)

    def placed(self, action: Dispatch, now: float) -> None:
        self._placements += 1
        if not action.hit:
            self._misses += 1
            self._false_misses += action.held_elsewhere
            self._loaded_false_misses += action.held_elsewhere and self._loaded_elsewhere(
                action, now
            )

    def answered(
        self, requests: Sequence[RequestId], done_s: float, run_s: float, share: float = 1.0
    ) -> None:
        """When the requests of a placement will have been answered, after a run on this share."""
        for request in requests:
            self.latencies.append(done_s - self._arrived_s.pop(request))
        self._computing_s += run_s * share
        late_s = min(run_s, max(0.0, done_s - self._arriving_s))
        self._computing_arriving_s += (run_s - late_s) * share
        self._end_s = max(self._end_s, done_s)

    def summary(self) -> Summary:
        for model in self._copies:
            self._change_copies(model, 0)
        ordered = sorted(self.latencies)
        mean = fmean(ordered) if ordered else 0.0
        placements, gpus_s = max(1, self._placements), self._gpus * self._arriving_s
        return Summary(
            requests=len(ordered),
            avg_latency_s=mean,
            latency_variance=fmean((x - mean) ** 2 for x in ordered) if ordered else 0.0,
            p50_s=percentile(ordered, 0.50),
            p95_s=percentile(ordered, 0.95),
            p99_s=percentile(ordered, 0.99),
            miss_ratio=self._misses / placements,
            false_miss_ratio=self._false_misses / max(1, self._misses),
            duplicates={model: total / placements for model, total in self._copy_sums.items()},
            gpu_busy_ratio=self._computing_s / (self._gpus * self._end_s) if self._end_s else 0.0,
            makespan_s=self._end_s,
            loaded_false_miss_ratio=self._loaded_false_misses / max(1, self._misses),
            arriving_busy_ratio=self._computing_arriving_s / gpus_s if gpus_s else 0.0,
        )

    def _loaded_elsewhere(self, action: Dispatch, now: float) -> bool:
        """Whether another GPU has all the models, and is loading none of them."""
        by_model = [self._loaded_s[model] for model in action.models]
        return any(
            gpu != action.gpu and all(gpu in done_s and done_s[gpu] <= now for done_s in by_model)
            for gpu in by_model[0]
        )

    def _change_copies(self, model: ModelId, change: int) -> None:
        placements = self._placements
        self._copy_sums[model] += self._copies[model] * (placements - self._copies_since[model])
        self._copies_since[model] = placements
        self._copies[model] += change


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at this share of an ordered sequence, interpolated between its neighbours."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
