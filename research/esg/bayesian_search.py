"""Aquatope's offline search: Bayesian optimisation over configurations of all stages.

100 samples at random, then 50 rounds of five, as the paper has it. The surrogate is ours: Bayesian
linear regression of the logarithms of cost and latency on quadratic features of the options. The
samples are runs of full batches on an idle machine, with noise: what the offline training sees.
"""

from collections.abc import Sequence
from functools import cache
from math import erf, exp, log, pi, sqrt
from random import Random
from typing import NamedTuple

from research.esg.fitted_profiles import (
    BATCHES,
    VCPUS,
    VGPUS,
    EsgAssumptions,
    fitted_profiles,
)
from scheduler.model.values import Configuration
from scheduler.workflows.stage_profiles import Choice

_BOOTSTRAP, _ROUNDS, _A_ROUND = 100, 50, 5
_CANDIDATES = 40
_PRIOR_VARIANCE = 10.0
# Of the logarithms: what the quadratic leaves unexplained.
_SPREAD = 0.1
_LISTS = (BATCHES, VCPUS, VGPUS)

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
    return tuple(Configuration(*(random.choice(each) for each in _LISTS)) for _ in range(stages))


def _beside(plan: _Plan, random: Random) -> _Plan:
    """The same plan with one option of one stage drawn anew."""
    stage, dimension = random.randrange(len(plan)), random.randrange(len(_LISTS))
    changed = list(plan[stage])
    changed[dimension] = random.choice(_LISTS[dimension])
    return (*plan[:stage], Configuration(*changed), *plan[stage + 1 :])


def _below(deviations: float) -> float:
    return (1.0 + erf(deviations / sqrt(2.0))) / 2.0


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(_times, one, other))


def _times(one: float, other: float) -> float:
    return one * other
