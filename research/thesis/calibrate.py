"""Chooses one setting for what the thesis leaves open: most of its claims, then least distance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from research.thesis.claims import Verdict, judge
from research.thesis.experiments import Measured, Setting, measure
from research.thesis.printed_figures import Claim, LimitRow, Paper
from research.thesis.readings import Readings
from scheduler.sim.engine import Progress
from scheduler.sim.workload import Arrivals, Pattern

# Found by a search such as `gpufaas reproduce --calibrate` makes: docs/decisions/0049. How flat the
# optimum is shows docs/evaluation.md.
READ = Readings(spares_waiting=False, takes_first=True, rro3_window=2, held_when_loaded=True)
CHOSEN = Setting(Pattern(Arrivals.UNIFORM), gpu_memory_mb=7982, overhead_s=0.45, readings=READ)

# Seeds of the four rounds of a search, and of the slices that the evaluation shows.
SEEDS = (2, 2, 5, 20)
AROUND_SEEDS = 5
_READ_FROM = 3
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
_WINDOWS = (0, 2)


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
    """A setting, how many claims it reproduces, and its figures' distance from the thesis's."""

    setting: Setting
    distance: Distance
    reproduced: int = 0


def distance(measured: Measured, paper: Paper) -> Distance:
    """The distance of our figures from the thesis's."""
    claims = [_claim_error(measured, claim) for claim in paper.claims]
    claims += [_utilisation_error(measured, paper, policy) for policy in paper.utilised]
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
    """Each setting with its claims and its distance."""
    return [point(measured, paper) for measured in measure(settings, paper, seeds, done)]


def point(measured: Measured, paper: Paper) -> Point:
    """A measured setting with its claims and its distance."""
    verdicts = [each.verdict for each in judge(measured, paper)]
    reproduced = verdicts.count(Verdict.REPRODUCED)
    return Point(measured.setting, distance(measured, paper), reproduced)


def coarse() -> list[Setting]:
    """The whole grid, under the readings in use."""
    return [
        Setting(pattern, memory_mb, overhead_s, READ)
        for pattern in PATTERNS
        for memory_mb in MEMORIES_MB
        for overhead_s in OVERHEADS_S
    ]


def read(found: Iterable[Point], combinations: Sequence[Readings]) -> list[Setting]:
    """The best settings of a grid under each of these combinations of readings."""
    return [
        replace(point.setting, readings=readings)
        for point in best(found, _READ_FROM)
        for readings in combinations
    ]


def fine(found: Iterable[Point]) -> list[Setting]:
    """Small steps of the overhead around the best settings."""
    settings = {
        replace(
            point.setting, overhead_s=round(max(0.0, point.setting.overhead_s + step_s), 2)
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
        [replace(setting, pattern=each, overhead_s=s) for each in patterns for s in overheads_s],
        [
            replace(setting, gpu_memory_mb=each, overhead_s=s)
            for each in memories_mb
            for s in overheads_s
        ],
    )


def best(found: Iterable[Point], number: int) -> list[Point]:
    """The settings that reproduce most claims; of equal ones the nearest first."""
    return sorted(found, key=lambda point: (-point.reproduced, point.distance.total))[:number]


def all_readings() -> list[Readings]:
    """Every combination: each reading is on or off, and a window is 2 or unbounded."""
    both = (False, True)
    combinations = product(both, both, both, _WINDOWS, both, both, both)
    return [Readings(*chosen) for chosen in combinations]


def _claim_error(measured: Measured, claim: Claim) -> float:
    theirs = claim.change_percent
    return fmean(_error(100.0 * (ratio - 1.0), theirs) for ratio in measured.ratios(claim))


def _utilisation_error(measured: Measured, paper: Paper, policy: str) -> float:
    theirs = paper.utilisation_ratio(policy)
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
