"""Every policy on every ground, and how far the one policy for all is behind the best of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from research.grounds.loads import Case, Goal, Ground, GroundFigures, grounds
from scheduler import policies
from scheduler.sim.engine import Progress
from scheduler.sim.study import core_pool

ONE, BASE = "gain", "lalbo3"
# The sweeps that chose gain's parameters used the seeds from 101 on, which the page does not.
SEEDS = (1, 2, 3)
# So far behind the best policy of a ground gain may be.
TOLERATED = 0.03


class GroundPlan(NamedTuple):
    """How much is simulated."""

    grounds: Sequence[Ground]
    policies: Sequence[str]
    seeds: Sequence[int]


class Behind(NamedTuple):
    """By how much gain is behind the best other policy in one goal on one load; below zero: ahead.

    It is a part of the other's figure, and of deadlines met a part of all calls.
    """

    ground: Ground
    case: Case
    goal: Goal
    best: str
    by: float
    by_base: float


@dataclass(frozen=True, slots=True)
class GroundEvaluation:
    """The means over the seeds, by the names of a ground, a load and a policy."""

    plan: GroundPlan
    figures: Mapping[tuple[str, str, str], GroundFigures]

    def of(self, ground: Ground, case: Case, policy: str) -> GroundFigures:
        """One policy's figures on one load."""
        return self.figures[ground.title, case.label, policy]

    def behind(self, ground: Ground) -> list[Behind]:
        """Gain against the best other policy, for each load and goal."""
        rivals = [name for name in self.plan.policies if name != ONE]
        found = []
        for case in ground.cases:
            for goal in case.goals:
                mine = self.of(ground, case, ONE).of(goal)
                values = {name: self.of(ground, case, name).of(goal) for name in rivals}
                best = max(rivals, key=lambda name: -behind(goal, values[name], 1.0))
                by, by_base = (behind(goal, mine, values[name]) for name in (best, BASE))
                found.append(Behind(ground, case, goal, best, by, by_base))
        return found


def behind(goal: Goal, mine: float, other: float) -> float:
    """By how much one figure is worse than another."""
    return other - mine if goal is Goal.IN_TIME else mine / other - 1.0


def default_ground_plan() -> GroundPlan:
    """The plan of the page."""
    return GroundPlan(grounds(), policies.available(), SEEDS)


def evaluate_grounds(plan: GroundPlan, done: Progress | None = None) -> GroundEvaluation:
    """Simulate the plan, on the cores of this machine."""
    keys = [
        (ground, case, name)
        for ground in plan.grounds
        for case in ground.cases
        for name in plan.policies
    ]
    tasks = [(*key, seed) for key in keys for seed in plan.seeds]
    found: list[GroundFigures] = []
    with core_pool() as pool:
        for figures in pool.map(_run, tasks):
            found.append(figures)
            if done is not None:
                done(len(found), len(tasks))
    many = len(plan.seeds)
    return GroundEvaluation(
        plan,
        {
            (ground.title, case.label, name): _mean(found[at * many : (at + 1) * many])
            for at, (ground, case, name) in enumerate(keys)
        },
    )


def _run(task: tuple[Ground, Case, str, int]) -> GroundFigures:
    ground, case, policy, seed = task
    parameters = {"overlap": ground.overlap} if policies.takes(policy, "overlap") else {}
    return case.run(policy, parameters, seed)


def _mean(runs: Sequence[GroundFigures]) -> GroundFigures:
    return GroundFigures(*(fmean(values) for values in zip(*runs, strict=True)))
