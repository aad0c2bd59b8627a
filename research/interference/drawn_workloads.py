"""Workloads as the paper may have had them: what it does not print is drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from random import Random

from research.interference.pair_choice import PairedJob
from research.interference.printed_interference import PrintedInterference, additive
from scheduler.estimates.interference.resource_metrics import METRICS

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
