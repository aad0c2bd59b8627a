"""ESG_1Q (appendix B): the K cheapest ways to run stages one after the other within a time.

A path is a choice for each stage. Two blades cut partial paths: the time that a path needs at
least, and its least cost against the K-th lowest of what K others cost at most. What appendix B
leaves open is read so: paths of a stage and of the next one are kept apart; a bound that a path
would loosen stays; a path is paired with no further choice once its cheapest end is too dear.

A third blade, ours, cuts what K others beat in both time and cost: choices of a stage before the
search, and partial paths after each stage. All three leave the K lowest costs as they are.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from scheduler.policies.weighing import Choice, StageProfile, undominated

KEPT_PATHS = 5


class ConfigurationPath(NamedTuple):
    """A choice for each stage, with their cost for one request and their time."""

    cost: float
    time_s: float
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class _Rest:
    """What the stages after the next one need: at least, and at their fastest."""

    least_s: float
    least_cost: float
    fastest_cost: float


def cheapest_paths(
    profiles: Sequence[StageProfile],
    target_s: float,
    kept: int = KEPT_PATHS,
    *,
    third_blade: bool = True,
) -> list[ConfigurationPath]:
    """The cheapest paths that take less than the target, cheapest first; none if none does."""
    paths = [ConfigurationPath(0.0, 0.0, ())]
    for stage, rest in zip(profiles, _rests(profiles), strict=True):
        choices = undominated(stage.choices, kept) if third_blade else stage.choices
        paths = _extended(paths, choices, rest, target_s, kept)
        if third_blade:
            paths = undominated_paths(paths, kept)
        paths.sort()
    return paths[:kept]


def undominated_paths(paths: Sequence[ConfigurationPath], kept: int) -> list[ConfigurationPath]:
    """The paths to which fewer than `kept` others are at once as fast and as cheap, by time."""
    kept_paths = []
    lowest = [inf] * kept  # the lowest costs of those found, ascending
    for path in sorted(paths, key=_by_time):
        if path.cost < lowest[-1]:
            kept_paths.append(path)
            insort(lowest, path.cost)
            lowest.pop()
    return kept_paths


def _rests(profiles: Sequence[StageProfile]) -> list[_Rest]:
    after = [profile.choices for profile in reversed(profiles[1:])]
    sums = (
        accumulate((choices[0].time_s for choices in after), initial=0.0),
        accumulate((min(choice.cost for choice in choices) for choices in after), initial=0.0),
        accumulate((choices[0].cost for choices in after), initial=0.0),
    )
    return [_Rest(*totals) for totals in zip(*sums, strict=True)][::-1]


def _extended(
    paths: Sequence[ConfigurationPath],
    choices: Sequence[Choice],
    rest: _Rest,
    target_s: float,
    kept: int,
) -> list[ConfigurationPath]:
    """Every path, cheapest first, with every choice that the two blades of the paper leave."""
    least_cost = min(choice.cost for choice in choices)
    bounds = [inf] * kept  # the lowest costs at most of paths that were kept, ascending
    extended: list[ConfigurationPath] = []
    for cost, time_s, chosen in paths:
        time_left_s = target_s - time_s - rest.least_s
        if cost + least_cost + rest.least_cost >= bounds[-1]:
            break
        for choice in choices:
            if choice.time_s >= time_left_s:
                break
            longer = cost + choice.cost
            if longer + rest.least_cost >= bounds[-1]:
                continue
            extended.append(ConfigurationPath(longer, time_s + choice.time_s, (*chosen, choice)))
            at_most = longer + rest.fastest_cost
            if at_most < bounds[-1]:
                insort(bounds, at_most)
                bounds.pop()
    return extended


def _by_time(path: ConfigurationPath) -> tuple[float, float]:
    return path.time_s, path.cost


@dataclass(frozen=True, slots=True)
class PathCurve:
    """Answers to every target: from each time on, the cheapest paths that take no longer.

    They are found in one pass over the stages: a partial path to which K others are at once as fast
    and as cheap is part of no answer. A look-up costs about a microsecond.
    """

    times_s: tuple[float, ...]
    answers: tuple[tuple[ConfigurationPath, ...], ...]

    def cheapest(self, target_s: float) -> tuple[ConfigurationPath, ...]:
        """The cheapest paths that take less than the target, cheapest first; none if none does."""
        place = bisect_left(self.times_s, target_s)
        return self.answers[place - 1] if place else ()

    @property
    def fastest(self) -> ConfigurationPath:
        """What to run where no path takes less than the target (appendix B does not say)."""
        return self.answers[0][0]

    @property
    def cheapest_of_all(self) -> ConfigurationPath:
        """The cheapest path, however long it takes."""
        return self.answers[-1][0]


def path_curve(profiles: Sequence[StageProfile], kept: int = KEPT_PATHS) -> PathCurve:
    paths = [ConfigurationPath(0.0, 0.0, ())]
    for stage in profiles:
        choices = undominated(stage.choices, kept)
        longer = [
            ConfigurationPath(
                path.cost + choice.cost, path.time_s + choice.time_s, (*path.choices, choice)
            )
            for path in paths
            for choice in choices
        ]
        paths = undominated_paths(longer, kept)
    return _answers(paths, kept)


def _answers(paths: Sequence[ConfigurationPath], kept: int) -> PathCurve:
    times: list[float] = []
    answers: list[tuple[ConfigurationPath, ...]] = []
    best: list[ConfigurationPath] = []
    for path in paths:
        best = sorted((*best, path))[:kept]
        times.append(path.time_s)
        answers.append(tuple(best))
    return PathCurve(tuple(times), tuple(answers))
