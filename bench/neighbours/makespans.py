"""CallsJob lists, and the time until their last job is done: in pairs by orders, or by policies."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from random import Random
from statistics import fmean
from typing import NamedTuple, Protocol

from bench.neighbours.job_node import CallsDone, CallsJob
from research.interference.pair_choice import (
    Chooser,
    PairedJob,
    greedy,
    in_order,
    most_saved,
    mystic,
    shortest_first,
)

PAIRS, OURS, SJF, RANDOM, MYSTIC = "pairs", "ours", "sjf", "random", "mystic"
POLICIES = ("pairs", "lb")
_SPREAD = 4.0  # the longest job of a list over the shortest


class RunsJobs(Protocol):
    """What runs jobs."""

    def begin(self, job: CallsJob) -> None: ...

    def next_done(self) -> CallsDone: ...


class JobList(NamedTuple):
    """Jobs in the order in which they came."""

    seed: int
    jobs: Sequence[CallsJob]


def drawn_list(alone_s: Mapping[str, float], jobs: int, mean_s: float, seed: int) -> JobList:
    """So many jobs of the models in turn, in a random order, of this mean length alone.

    `alone_s` are the seconds of one call of each model.
    """
    random, names = Random(seed), list(alone_s)
    wanted = [exp(random.uniform(0.0, log(_SPREAD))) for _ in range(jobs)]
    scale = mean_s / fmean(wanted)
    found = []
    for number, length in enumerate(wanted):
        model = names[number % len(names)]
        calls = max(1, round(length * scale / alone_s[model]))
        found.append(CallsJob(f"{seed}-{number}", model, calls, calls * alone_s[model]))
    random.shuffle(found)
    return JobList(seed, found)


def choosers(slowdown: Callable[[str, str], float]) -> dict[str, Chooser]:
    """The orders by name; the first two know how much models slow each other down."""

    def of_jobs(foreground: PairedJob, background: PairedJob) -> float:
        return slowdown(_model(foreground), _model(background))

    return {
        PAIRS: greedy(of_jobs),
        OURS: most_saved(of_jobs),
        SJF: shortest_first,
        RANDOM: in_order,
        MYSTIC: mystic,
    }


class OrderFacts(NamedTuple):
    """Facts about each model that orders go by."""

    peak_bytes: Mapping[str, float]
    metrics: Mapping[str, Sequence[float]]


def in_pairs_s(
    runs: RunsJobs, chosen: JobList, choose: Chooser, facts: OrderFacts, gpu_bytes: float
) -> float:
    """The seconds until all jobs are done: the next pair begins when both of one have ended."""
    jobs = {f"{job.model}/{job.name}": job for job in chosen.jobs}
    waiting = [
        PairedJob(name, job.alone_s, facts.peak_bytes[job.model], tuple(facts.metrics[job.model]))
        for name, job in jobs.items()
    ]
    begun_s = time.perf_counter()
    while waiting:
        pair = choose(waiting, gpu_bytes).jobs
        for one in pair:
            waiting.remove(one)
            runs.begin(jobs[one.name])
        for _ in pair:
            runs.next_done()
    return time.perf_counter() - begun_s


def all_at_once_s(runs: RunsJobs, chosen: JobList) -> float:
    """The seconds until all jobs are done that call from the beginning: the policy chooses."""
    begun_s = time.perf_counter()
    for job in chosen.jobs:
        runs.begin(job)
    for _ in chosen.jobs:
        runs.next_done()
    return time.perf_counter() - begun_s


def normalised(metrics: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Each metric as a share of the largest, as Mystic compares them."""
    largest = [max(values) for values in zip(*metrics.values(), strict=True)]
    return {
        name: tuple(
            value / most if most else 0.0 for value, most in zip(values, largest, strict=True)
        )
        for name, values in metrics.items()
    }


def _model(job: PairedJob) -> str:
    return job.name.partition("/")[0]
