"""The figures of one simulation."""

from dataclasses import dataclass


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
