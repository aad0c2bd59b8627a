"""Schedulers that plan all stages before the first one: Orion and Aquatope."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from math import erf, exp, inf, log, pi, sqrt
from random import Random
from typing import NamedTuple

from research.esg.adaptive_planners import AppFunctionLanes, largest_batch
from research.esg.applications import Application
from research.esg.fitted_profiles import BATCHES, VCPUS, VGPUS, EsgAssumptions, fitted_profiles
from research.esg.lane_plans import LanePlan, StageCall
from scheduler.model.values import Configuration
from scheduler.policies.weighing import Choice

_BOOTSTRAP, _ROUNDS, _A_ROUND = 100, 50, 5
_CANDIDATES = 40
_PRIOR_VARIANCE = 10.0
# Of the logarithms: what the quadratic leaves unexplained.
_SPREAD = 0.1
_DRAWN = (BATCHES, VCPUS, VGPUS)

_Plan = tuple[Configuration, ...]


class _Sample(NamedTuple):
    plan: _Plan
    cost: float
    latency_s: float


@cache
def learned(stages: tuple[str, ...], slo_s: float, assumed: EsgAssumptions) -> _Plan:
    """The cheapest plan that was seen within the deadline; the fastest one if none was."""
    random = Random(f"aquatope {stages} {slo_s:.6f}")
    trial = _Trial(stages, assumed, random)
    samples = [trial.run(_drawn(len(stages), random)) for _ in range(_BOOTSTRAP)]
    surrogate = _Surrogate(len(_features(samples[0].plan)))
    for each in samples:
        surrogate.learn(each)
    for _ in range(_ROUNDS):
        best = _best(samples, slo_s)
        candidates = [_drawn(len(stages), random) for _ in range(_CANDIDATES // 2)]
        candidates += [_beside(best.plan, random) for _ in range(_CANDIDATES // 2)]
        candidates.sort(key=lambda plan: -surrogate.gain(plan, best.cost, slo_s))
        for plan in candidates[:_A_ROUND]:
            samples.append(trial.run(plan))
            surrogate.learn(samples[-1])
    return _best(samples, slo_s).plan


class _Trial:
    """Runs of a plan with full batches, alone on the machine."""

    def __init__(self, stages: Sequence[str], assumed: EsgAssumptions, random: Random) -> None:
        profiles = fitted_profiles(assumed)
        self._choices: list[dict[Configuration, Choice]] = [
            {each.configuration: each for each in profiles[stage].choices} for stage in stages
        ]
        self._noise = assumed.noise
        self._random = random

    def run(self, plan: _Plan) -> _Sample:
        chosen = [choices[each] for choices, each in zip(self._choices, plan, strict=True)]
        factors = [max(self._random.gauss(1.0, self._noise), 0.5) for _ in chosen]
        pairs = list(zip(chosen, factors, strict=True))
        cost = sum(each.cost * factor for each, factor in pairs)
        return _Sample(plan, cost, sum(each.time_s * factor for each, factor in pairs))


class _Surrogate:
    """A posterior over the weights of the features, for cost and for latency."""

    def __init__(self, many: int) -> None:
        self._covariance = [
            [_PRIOR_VARIANCE if row == column else 0.0 for column in range(many)]
            for row in range(many)
        ]
        self._weights = ([0.0] * many, [0.0] * many)

    def learn(self, sample: _Sample) -> None:
        """One observation more: a Kalman update."""
        features = _features(sample.plan)
        spread = [_dot(row, features) for row in self._covariance]
        variance = _dot(spread, features) + _SPREAD**2
        gain = [each / variance for each in spread]
        for weights, seen in zip(
            self._weights, (log(sample.cost), log(sample.latency_s)), strict=True
        ):
            error = seen - _dot(weights, features)
            for place, each in enumerate(gain):
                weights[place] += each * error
        for row, each in zip(self._covariance, gain, strict=True):
            row[:] = [value - each * other for value, other in zip(row, spread, strict=True)]

    def gain(self, plan: _Plan, best_cost: float, slo_s: float) -> float:
        """The expected improvement of the cost, times the probability to be in time."""
        features = _features(plan)
        cost, latency = (_dot(weights, features) for weights in self._weights)
        spread = [_dot(row, features) for row in self._covariance]
        deviation = sqrt(_dot(spread, features) + _SPREAD**2)
        better = (log(best_cost) - cost) / deviation
        density = exp(-better * better / 2.0) / sqrt(2.0 * pi)
        improvement = deviation * (better * _below(better) + density)
        return improvement * _below((log(slo_s) - latency) / deviation)


def _features(plan: _Plan) -> list[float]:
    """1, the logarithms of all options, their squares, and their products within a stage."""
    found = [1.0]
    for configuration in plan:
        batch, vcpus, vgpus = (log(each) for each in configuration)
        found += [batch, vcpus, vgpus, batch * batch, vcpus * vcpus, vgpus * vgpus]
        found += [batch * vcpus, batch * vgpus, vcpus * vgpus]
    return found


def _best(samples: Sequence[_Sample], slo_s: float) -> _Sample:
    return min(
        samples,
        key=lambda each: (0, each.cost) if each.latency_s <= slo_s else (1, each.latency_s),
    )


def _drawn(stages: int, random: Random) -> _Plan:
    return tuple(Configuration(*(random.choice(each) for each in _DRAWN)) for _ in range(stages))


def _beside(plan: _Plan, random: Random) -> _Plan:
    """The same plan with one option of one stage drawn anew."""
    stage, dimension = random.randrange(len(plan)), random.randrange(len(_DRAWN))
    changed = list(plan[stage])
    changed[dimension] = random.choice(_DRAWN[dimension])
    return (*plan[:stage], Configuration(*changed), *plan[stage + 1 :])


def _below(deviations: float) -> float:
    return (1.0 + erf(deviations / sqrt(2.0))) / 2.0


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(_times, one, other))


def _times(one: float, other: float) -> float:
    return one * other


CUT_OFF_MS = 100.0
# One-sided 95 % of a normal distribution.
_P95 = 1.645
# The goal: the 95th percentile at most so far below the deadline.
_GOAL = 1e-3
_LISTS = (BATCHES, VCPUS, VGPUS)


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """A configuration for each stage, and how long the search for it took."""

    configurations: tuple[Configuration, ...]
    search_s: float


class PreplannedPlanner(AppFunctionLanes):
    """Sticks to what was planned; where fewer calls wait than a batch needs, it takes those."""

    def __init__(self, name: str, assumed: EsgAssumptions) -> None:
        self.name = name
        self._assumed = assumed

    def plan(self, waiting: Sequence[StageCall], now: float) -> LanePlan:  # noqa: ARG002  # fixed
        """The configuration of this stage; the search comes before the first stage."""
        first = waiting[0]
        fixed = self._plan_for(first.application, first.slo_s)
        planned = fixed.configurations[first.stage]
        missed = planned.batch > len(waiting)
        used = planned._replace(batch=largest_batch(len(waiting))) if missed else planned
        search_s = fixed.search_s if first.stage == 0 else 0.0
        return LanePlan((used,), search_s, missed=missed)

    def _plan_for(self, application: Application, slo_s: float) -> FixedPlan:
        raise NotImplementedError


class OrionPlanner(PreplannedPlanner):
    """Best-first search, cut off; `counts_search`: whether calls wait while it searches."""

    def __init__(
        self,
        assumed: EsgAssumptions,
        cut_off_ms: float = CUT_OFF_MS,
        *,
        counts_search: bool = True,
        by_cost: bool = False,
    ) -> None:
        super().__init__("Orion", assumed)
        self._cut_off_ms = cut_off_ms
        self._counts_search = counts_search
        self._by_cost = by_cost

    def _plan_for(self, application: Application, slo_s: float) -> FixedPlan:
        found = best_first(
            application.stages, slo_s, self._assumed, self._cut_off_ms, self._by_cost
        )
        return found if self._counts_search else FixedPlan(found.configurations, 0.0)


class AquatopePlanner(PreplannedPlanner):
    """What Bayesian optimisation learned before; nothing is searched when a call comes."""

    def __init__(self, assumed: EsgAssumptions) -> None:
        super().__init__("Aquatope", assumed)

    def _plan_for(self, application: Application, slo_s: float) -> FixedPlan:
        return FixedPlan(learned(application.stages, slo_s, self._assumed), 0.0)


@cache
def best_first(
    stages: tuple[str, ...],
    slo_s: float,
    assumed: EsgAssumptions,
    cut_off_ms: float,
    by_cost: bool = False,  # noqa: FBT001, FBT002  # a cached function's arguments are its key
) -> FixedPlan:
    """Orion: from the least state, one option of one stage larger at a time.

    The state whose 95th percentile is nearest to the deadline comes first (or the cheapest one);
    at the cut-off the nearest one seen that is in time is the answer, or else the fastest one seen.
    """
    search = _BestFirst(stages, slo_s, assumed)
    start = tuple((0, 0, 0) for _ in stages)
    queue = [(search.rank(start, by_cost), start)]
    seen = {start}
    most = max(int(cut_off_ms * assumed.states_a_ms), 1)
    examined, best, nearest = 0, start, (2, inf)
    while queue and examined < most:
        _, state = heappop(queue)
        examined += 1
        nearness = search.nearness(state)
        if nearness < nearest:
            best, nearest = state, nearness
        if nearness[0] == 0 and (by_cost or nearness[1] <= _GOAL * slo_s):
            best = state
            break
        for larger in _larger(state):
            if larger not in seen:
                seen.add(larger)
                heappush(queue, (search.rank(larger, by_cost), larger))
    return FixedPlan(search.configurations(best), examined / assumed.states_a_ms / 1e3)


_State = tuple[tuple[int, int, int], ...]


class _BestFirst:
    """What one state of Orion's search is worth."""

    def __init__(self, stages: Sequence[str], slo_s: float, assumed: EsgAssumptions) -> None:
        profiles = fitted_profiles(assumed)
        self._choices = [
            {each.configuration: each for each in profiles[stage].choices} for stage in stages
        ]
        self._slo_s = slo_s
        self._noise = assumed.noise

    def configurations(self, state: _State) -> tuple[Configuration, ...]:
        return tuple(
            Configuration(*(options[place] for options, place in zip(_LISTS, each, strict=True)))
            for each in state
        )

    def rank(self, state: _State, by_cost: bool) -> float:  # noqa: FBT001  # as above
        chosen = zip(self._choices, self.configurations(state), strict=True)
        if by_cost:
            return sum(choices[each].cost for choices, each in chosen)
        return abs(self._slo_s - self._p95_s(state))

    def nearness(self, state: _State) -> tuple[int, float]:
        """In time or not, and how far from the deadline."""
        over_s = self._p95_s(state) - self._slo_s
        return int(over_s > 0.0), abs(over_s)

    def _p95_s(self, state: _State) -> float:
        chosen = zip(self._choices, self.configurations(state), strict=True)
        times = [choices[each].time_s for choices, each in chosen]
        return sum(times) + _P95 * self._noise * sqrt(sum(time_s**2 for time_s in times))


def _larger(state: _State) -> list[_State]:
    found = []
    for stage, places in enumerate(state):
        for dimension, options in enumerate(_LISTS):
            if places[dimension] + 1 < len(options):
                larger = list(places)
                larger[dimension] += 1
                found.append(
                    (*state[:stage], (larger[0], larger[1], larger[2]), *state[stage + 1 :])
                )
    return found
