"""The paper's comparison of four orders, and ours, over many drawn workloads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import product
from math import exp, log
from random import Random
from statistics import fmean

from research.interference.pair_choice import (
    Chooser,
    PairedJob,
    SlowdownOf,
    greedy,
    in_order,
    most_saved,
    mystic,
    shortest_first,
    together_s,
)
from research.interference.printed import (
    AdditiveTable,
    PrintedInterference,
    additive,
    interference_paper,
)
from scheduler.model.values import METRICS

# Bounds of the parts of the applications whose slowdowns are not printed: those of Table IV's.
_SUFFERS = (0.0, 0.083)
_DISTURBS = (1.0, 1.25)
# Peaks in GB, beside the two that are printed: such that Table IV's pairs without memory, and only
# these, exceed 12 GB. (Its diagonal does not follow: two of vgg11 would need 17.5 GB.)
_PEAK_GB = {
    "cnn": 3.2,
    "googlenet": 3.0,
    "alexnet": 2.5,
    "vgg16": 8.9,
    "gromacs": 2.5,
    "qmcpack": 3.0,
    "hoomd": 2.5,
}


@dataclass(frozen=True, slots=True)
class DrawnSetting:
    """How a workload is drawn: jobs of each application, their spread, and what is not predicted.

    Seconds alone lie between 1 and `spread` times the least, evenly by logarithm. What really
    happens differs from the predicted slowdown by a normal error of this standard deviation.
    """

    copies: int
    gpus: int
    spread: float
    error: float


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """Jobs, the slowdowns that are predicted, and those that happen, by names of applications."""

    jobs: tuple[PairedJob, ...]
    predicted: Mapping[tuple[str, str], float]
    happens: Mapping[tuple[str, str], float]

    def predict(self, foreground: PairedJob, background: PairedJob) -> float:
        return self.predicted[_application(foreground), _application(background)]

    def truth(self, foreground: PairedJob, background: PairedJob) -> float:
        return self.happens[_application(foreground), _application(background)]


def draw(paper: PrintedInterference, setting: DrawnSetting, seed: int) -> DrawnWorkload:
    """One workload; the same seed draws the same one, whatever its errors' size."""
    random = Random(seed)
    predicted = _predicted(paper, random)
    happens = {
        pair: max(0.9, value + setting.error * random.gauss()) for pair, value in predicted.items()
    }
    peaks = {**_PEAK_GB, **paper.peak_gb}
    jobs = []
    for name in paper.applications:
        metrics = tuple(random.random() for _ in METRICS)
        seconds = exp(random.uniform(0.0, log(setting.spread)))
        jobs += [
            PairedJob(f"{name}/{number}", 100.0 * seconds, peaks[name], metrics)
            for number in range(setting.copies)
        ]
    random.shuffle(jobs)
    return DrawnWorkload(tuple(jobs), predicted, happens)


def _predicted(paper: PrintedInterference, random: Random) -> dict[tuple[str, str], float]:
    """Table IV and the four further pairs as printed, all others by the additive form."""
    table = additive(paper)
    suffers = {name: random.uniform(*_SUFFERS) for name in paper.applications}
    disturbs = {name: random.uniform(*_DISTURBS) for name in paper.applications}
    suffers |= table.suffers
    disturbs |= table.disturbs
    disturbs["lammps"] = paper.further_pairs["cnn", "lammps"] - suffers["cnn"]
    suffers["gromacs"] = paper.further_pairs["gromacs", "lammps"] - disturbs["lammps"]
    disturbs["hoomd"] = paper.further_pairs["qmcpack", "hoomd"] - suffers["qmcpack"]
    found = {
        (one, other): suffers[one] + disturbs[other]
        for one in paper.applications
        for other in paper.applications
    }
    return {**found, **paper.table, **paper.further_pairs}


def _application(job: PairedJob) -> str:
    return job.name.partition("/")[0]


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


GREEDY, SJF, RANDOM, MYSTIC, OURS = "greedy", "sjf", "random", "mystic", "ours"
ORDERS = (GREEDY, SJF, RANDOM, MYSTIC, OURS)
RIVALS = (SJF, RANDOM, MYSTIC)
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """Which settings are drawn, and how often."""

    settings: Sequence[DrawnSetting]
    seeds: int


@dataclass(frozen=True, slots=True)
class OrdersFigures:
    """Makespans over that of the random order, on average over the draws of one setting.

    `reached` counts the draws in which greedy is ahead of all three rivals by the printed shares.
    """

    setting: DrawnSetting
    over_random: Mapping[str, float]
    serial_over_random: float
    reached: int


@dataclass(frozen=True, slots=True)
class InterferenceEvaluation:
    """What the page shows."""

    paper: PrintedInterference
    parts: AdditiveTable
    seeds: int
    figures: Sequence[OrdersFigures]


def default_interference_plan() -> InterferencePlan:
    """The command's plan."""
    error = interference_paper().mse ** 0.5
    settings = product((1, 2, 4), (1, 2), (2.0, 5.0, 10.0), (0.0, error))
    return InterferencePlan([DrawnSetting(*setting) for setting in settings], seeds=200)


def evaluate_interference(plan: InterferencePlan, announce: Announce) -> InterferenceEvaluation:
    """Simulate the plan."""
    paper = interference_paper()
    figures = []
    for setting in plan.settings:
        announce(
            f"{setting.copies} of each application, {setting.gpus} GPUs, "
            f"spread {setting.spread:g}, error {setting.error:.2f}"
        )
        figures.append(_figures(paper, setting, plan.seeds))
    return InterferenceEvaluation(paper, additive(paper), plan.seeds, figures)


def _figures(paper: PrintedInterference, setting: DrawnSetting, seeds: int) -> OrdersFigures:
    over: dict[str, list[float]] = {name: [] for name in ORDERS}
    serial: list[float] = []
    reached = 0
    for seed in range(seeds):
        workload = draw(paper, setting, seed)
        spans = _makespans(paper, setting, workload)
        for name, span_s in spans.items():
            over[name].append(span_s / spans[RANDOM])
        serial_s = sum(job.seconds for job in workload.jobs) / setting.gpus
        serial.append(serial_s / spans[RANDOM])
        reached += all(
            spans[GREEDY] / spans[rival] <= paper.makespan_s[GREEDY] / paper.makespan_s[rival]
            for rival in RIVALS
        )
    means = {name: fmean(found) for name, found in over.items()}
    return OrdersFigures(setting, means, fmean(serial), reached)


def _makespans(
    paper: PrintedInterference, setting: DrawnSetting, workload: DrawnWorkload
) -> dict[str, float]:
    choosers: Mapping[str, Chooser] = {
        GREEDY: greedy(workload.predict),
        SJF: shortest_first,
        RANDOM: in_order,
        MYSTIC: mystic,
        OURS: most_saved(workload.predict),
    }
    return {
        name: run_in_pairs(
            workload.jobs, chooser, workload.truth, gpus=setting.gpus, gpu_bytes=paper.gpu_gb
        ).makespan_s
        for name, chooser in choosers.items()
    }
