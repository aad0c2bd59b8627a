"""Chooses one setting for what the thesis leaves open, by the distance to all its figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from scheduler.sim.engine import Progress
from scheduler.sim.papers.thesis.experiments import Measured, Setting, measure
from scheduler.sim.papers.thesis.printed_figures import Claim, LimitRow, Paper
from scheduler.sim.workload import Arrivals, Pattern

# The result of `gpufaas reproduce --calibrate`; docs/evaluation.md shows how flat the optimum is.
CHOSEN = Setting(Pattern(Arrivals.UNIFORM), gpu_memory_mb=7982, overhead_s=0.45)

# Seeds of the three rounds of a search, and of the slices that the evaluation shows.
SEEDS = (2, 5, 20)
AROUND_SEEDS = 3
_FINE_FROM = 3
_LAST_FROM = 5
_FINE_STEPS_S = (-0.15, -0.10, -0.05, 0.0, 0.05, 0.10, 0.15)
_AROUND_STEPS_S = (-0.1, 0.0, 0.1)

PATTERNS = (
    Pattern(Arrivals.UNIFORM),
    Pattern(Arrivals.POISSON),
    *(Pattern(Arrivals.BUNCHED, bunch_s) for bunch_s in (0.0, 15.0, 30.0, 45.0, 54.0)),
)
# An RTX 2080 reports 7,982 of its nominal 8,192 MB; less if other programs use a part of it.
MEMORIES_MB = (6500, 7000, 7500, 7982)
OVERHEADS_S = (0.0, 0.2, 0.4, 0.6)


@dataclass(frozen=True, slots=True)
class Distance:
    """Mean absolute relative errors of the three groups of figures, each error at most 1."""

    claims: float
    table2: float
    table3: float

    @property
    def total(self) -> float:
        return fmean((self.claims, self.table2, self.table3))


@dataclass(frozen=True, slots=True)
class Point:
    """A setting, and the distance of its figures from the thesis's."""

    setting: Setting
    distance: Distance


def distance(measured: Measured, paper: Paper) -> Distance:
    """The distance of our figures from the thesis's."""
    claims = [_claim_error(measured, claim) for claim in paper.claims]
    claims += [_utilisation_error(measured, paper, policy) for policy in _compared(paper)]
    return Distance(
        claims=fmean(claims),
        table2=fmean(
            _error(ours, theirs)
            for row in paper.table2
            for ours, theirs in zip(
                measured.figures[row.policy, row.working_set].copies, row.copies, strict=True
            )
        ),
        table3=fmean(error for row in paper.table3 for error in _sweep_errors(measured, row)),
    )


def points(
    settings: Sequence[Setting], paper: Paper, seeds: int, done: Progress | None = None
) -> list[Point]:
    """Each setting with its distance."""
    return [
        Point(measured.setting, distance(measured, paper))
        for measured in measure(settings, paper, seeds, done)
    ]


def coarse() -> list[Setting]:
    """The whole grid."""
    return [
        Setting(pattern, memory_mb, overhead_s)
        for pattern in PATTERNS
        for memory_mb in MEMORIES_MB
        for overhead_s in OVERHEADS_S
    ]


def fine(found: Iterable[Point]) -> list[Setting]:
    """Small steps of the overhead around the best settings of a grid."""
    settings = {
        Setting(
            point.setting.pattern,
            point.setting.gpu_memory_mb,
            round(max(0.0, point.setting.overhead_s + step_s), 2),
        ): None
        for point in best(found, _FINE_FROM)
        for step_s in _FINE_STEPS_S
    }
    return list(settings)


def last(found: Iterable[Point]) -> list[Setting]:
    """The best settings of a grid, for many seeds."""
    return [point.setting for point in best(found, _LAST_FROM)]


def around(setting: Setting) -> tuple[list[Setting], list[Setting]]:
    """Two slices through the grid at a setting: over arrivals, and over memory sizes."""
    near_s = [round(setting.overhead_s + step_s, 2) for step_s in _AROUND_STEPS_S]
    overheads_s = [0.0, *(seconds for seconds in near_s if seconds > 0.0)]
    patterns = list(dict.fromkeys((setting.pattern, *PATTERNS)))
    memories_mb = sorted({setting.gpu_memory_mb, *MEMORIES_MB})
    return (
        [Setting(each, setting.gpu_memory_mb, s) for each in patterns for s in overheads_s],
        [Setting(setting.pattern, each, s) for each in memories_mb for s in overheads_s],
    )


def best(found: Iterable[Point], number: int) -> list[Point]:
    """The nearest settings, nearest first."""
    return sorted(found, key=lambda point: point.distance.total)[:number]


def utilisation_ratio(paper: Paper, policy: str) -> float:
    """The thesis's SM utilisation of a policy over that of RR."""
    return paper.sm_utilisation[policy] / paper.sm_utilisation[paper.policies[0]]


def _compared(paper: Paper) -> list[str]:
    return [policy for policy in paper.sm_utilisation if policy != paper.policies[0]]


def _claim_error(measured: Measured, claim: Claim) -> float:
    theirs = claim.change_percent
    return fmean(_error(100.0 * (ratio - 1.0), theirs) for ratio in measured.ratios(claim))


def _utilisation_error(measured: Measured, paper: Paper, policy: str) -> float:
    theirs = utilisation_ratio(paper, policy)
    reference = paper.policies[0]
    return fmean(
        _error(measured.ratio(policy, reference, "gpu_busy_ratio", working_set), theirs)
        for working_set in paper.working_sets
    )


def _sweep_errors(measured: Measured, row: LimitRow) -> list[float]:
    ours = measured.sweep[row.o3_limit]
    return [
        _error(ours.avg_latency_s, row.avg_latency_s),
        _error(ours.latency_variance, row.latency_variance),
        _error(ours.miss_ratio, row.miss_ratio),
        _error(ours.false_miss_ratio, row.false_miss_ratio),
    ]


def _error(ours: float, theirs: float) -> float:
    return min(1.0, abs(ours - theirs) / abs(theirs))
