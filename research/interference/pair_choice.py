"""Which two jobs share a GPU next: greedy by interference, and the orders it is compared with."""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import dist
from typing import NamedTuple, Protocol


class PairedJob(NamedTuple):
    """A job that waits: what it is, its seconds alone, its most bytes, its normalised metrics."""

    name: str
    seconds: float
    peak_bytes: float
    metrics: tuple[float, ...] = ()


class SlowdownOf(Protocol):
    """How many times as long the first job takes beside the second."""

    def __call__(self, foreground: PairedJob, background: PairedJob, /) -> float: ...


class Chosen(NamedTuple):
    """Two jobs that run at once, or one alone."""

    jobs: tuple[PairedJob, ...]
    reason: str


Chooser = Callable[[Sequence[PairedJob], float], Chosen]  # jobs that wait, the GPU's bytes


def greedy(slowdown: SlowdownOf) -> Chooser:
    """The paper's: the pair whose jobs disturb each other least, and most evenly.

    Pairs are ranked by their mean slowdown plus its deviation |a/b - b/a|: the paper names both,
    and no weight.
    """

    def choose(waiting: Sequence[PairedJob], gpu_bytes: float) -> Chosen:
        best: tuple[float, PairedJob, PairedJob] | None = None
        for one, other in _fitting(waiting, gpu_bytes):
            a, b = slowdown(one, other), slowdown(other, one)
            rank = (a + b) / 2 + abs(a / b - b / a)
            if best is None or rank < best[0]:
                best = (rank, one, other)
        if best is None:
            return _alone(waiting)
        return Chosen(best[1:], "disturb each other least")

    return choose


def most_saved(slowdown: SlowdownOf) -> Chooser:
    """Ours: the longest job, with the partner that saves the most time against one after the other.

    It runs alone if no partner saves anything.
    """

    def choose(waiting: Sequence[PairedJob], gpu_bytes: float) -> Chosen:
        longest = max(waiting, key=lambda job: job.seconds)
        best_s, best = 0.0, None
        for other in waiting:
            if other is longest or longest.peak_bytes + other.peak_bytes > gpu_bytes:
                continue
            at_once_s = max(together_s(longest, other, slowdown))
            saved_s = longest.seconds + other.seconds - at_once_s
            if saved_s > best_s:
                best_s, best = saved_s, other
        if best is None:
            return Chosen((longest,), "no partner saves time")
        return Chosen((longest, best), "saves the most time")

    return choose


def together_s(one: PairedJob, other: PairedJob, slowdown: SlowdownOf) -> tuple[float, float]:
    """When each of two jobs ends that begin at once: alone again, a job is as fast as ever."""
    one_s, other_s = one.seconds * slowdown(one, other), other.seconds * slowdown(other, one)
    if one_s <= other_s:
        done = one_s / other_s if other_s else 1.0
        return one_s, one_s + (1.0 - done) * other.seconds
    done = other_s / one_s
    return other_s + (1.0 - done) * one.seconds, other_s


def shortest_first(waiting: Sequence[PairedJob], gpu_bytes: float) -> Chosen:
    """SJF: the two shortest jobs; the second one waits if memory is short."""
    return _first_two(sorted(waiting, key=lambda job: job.seconds), gpu_bytes, "shortest")


def in_order(waiting: Sequence[PairedJob], gpu_bytes: float) -> Chosen:
    """The first two: random, if the jobs come in a random order."""
    return _first_two(waiting, gpu_bytes, "next in line")


def mystic(waiting: Sequence[PairedJob], gpu_bytes: float) -> Chosen:
    """Mystic: the pair whose metrics are least alike."""
    best: tuple[float, PairedJob, PairedJob] | None = None
    for one, other in _fitting(waiting, gpu_bytes):
        apart = dist(one.metrics, other.metrics)
        if best is None or apart > best[0]:
            best = (apart, one, other)
    return _alone(waiting) if best is None else Chosen(best[1:], "least alike")


def _fitting(waiting: Sequence[PairedJob], gpu_bytes: float) -> list[tuple[PairedJob, PairedJob]]:
    return [
        (one, other)
        for one, other in combinations(waiting, 2)
        if one.peak_bytes + other.peak_bytes <= gpu_bytes
    ]


def _first_two(ordered: Sequence[PairedJob], gpu_bytes: float, reason: str) -> Chosen:
    first, *others = ordered
    if not others or first.peak_bytes + others[0].peak_bytes > gpu_bytes:
        return _alone(ordered)
    return Chosen((first, others[0]), reason)


def _alone(waiting: Sequence[PairedJob]) -> Chosen:
    return Chosen((waiting[0],), "nothing fits beside it")
