"""Jobs in pairs on GPUs, on virtual time: the next pair begins when both of one have ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from research.interference.pair_choice import Chooser, PairedJob, SlowdownOf, together_s


@dataclass(frozen=True, slots=True)
class PairedRun:
    """When the last job ended, how many pairs ran, and the jobs' mean slowdown."""

    makespan_s: float
    pairs: int
    mean_slowdown: float


def run_in_pairs(
    jobs: Sequence[PairedJob], choose: Chooser, truth: SlowdownOf, *, gpus: int, gpu_bytes: float
) -> PairedRun:
    """Run all jobs; `choose` says which go next to the GPU that is free first."""
    waiting = list(jobs)
    free_s = [0.0] * gpus
    heapify(free_s)
    pairs, slowdowns, last_s = 0, 0.0, 0.0
    while waiting:
        chosen = choose(waiting, gpu_bytes).jobs
        for job in chosen:
            waiting.remove(job)
        took_s: tuple[float, ...]
        if len(chosen) == 1:
            took_s = (chosen[0].seconds,)
        else:
            took_s = together_s(chosen[0], chosen[1], truth)
            pairs += 1
        slowdowns += sum(took / job.seconds for took, job in zip(took_s, chosen, strict=True))
        ended_s = free_s[0] + max(took_s)
        heapreplace(free_s, ended_s)
        last_s = max(last_s, ended_s)
    return PairedRun(last_s, pairs, slowdowns / len(jobs))
