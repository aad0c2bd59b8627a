"""How long searches take on this machine, against looking at every path; both find the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from time import process_time
from typing import TypeVar

from research.esg.adaptive_planners import distribution
from research.esg.applications import Application
from research.esg.fitted_profiles import EsgAssumptions, fitted_profiles
from research.esg.path_search import KEPT_PATHS, ConfigurationPath, cheapest_paths, path_curve
from research.esg.printed import LoadLevel, esg_paper
from scheduler.policies.weighing import StageProfile

# A search is asked with these parts of its target: later stages and calls that waited have less.
_PARTS_OF_TARGET = (0.85, 0.9, 0.95, 1.0)
_GROUP_OF_FOUR = 4
KEPT_COUNTS = (1, 5, 20, 80)

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class SearchTimes:
    """Milliseconds of processor time of searches for whole groups, ascending."""

    times_ms: tuple[float, ...]

    def at(self, part: float) -> float:
        """The time at this part of the ascending list."""
        return self.times_ms[int(part * (len(self.times_ms) - 1))]


@dataclass(frozen=True, slots=True)
class SearchStudy:
    """All that was timed. `gap`: the largest relative difference of a cost from brute force's."""

    by_level: dict[str, SearchTimes]
    two_blades: dict[str, SearchTimes]
    by_kept: dict[int, SearchTimes]
    group_of_four_ms: float
    brute_force_ms: float
    curve_ms: float
    look_up_us: float
    gap: float


def search_study(assumed: EsgAssumptions, many: int | None = None) -> SearchStudy:
    """Time everything; `many` limits each function's configurations, for tests."""
    levels = esg_paper().levels
    strict = levels[0]
    three = _profiles(esg_paper().applications[0].stages, assumed, many)
    target_s = _target_s(esg_paper().applications[0], levels[-1])
    brute, brute_ms = _timed(lambda: brute_force(three, target_s, KEPT_PATHS))
    found = cheapest_paths(three, target_s)
    curve, curve_ms = _timed(lambda: path_curve(three))
    _, thousand_ms = _timed(lambda: [curve.cheapest(target_s) for _ in range(1000)])
    five = esg_paper().applications[-1]
    four = _profiles(five.stages[:_GROUP_OF_FOUR], assumed, many)
    four_s = sum(esg_paper().table3[each].run_ms for each in five.stages[:_GROUP_OF_FOUR]) / 1e3
    return SearchStudy(
        by_level={each.name: _of_level(each, assumed, many) for each in levels},
        two_blades={
            each.name: _of_level(each, assumed, many, third_blade=False) for each in levels
        },
        by_kept={kept: _of_level(strict, assumed, many, kept) for kept in KEPT_COUNTS},
        group_of_four_ms=_timed(lambda: cheapest_paths(four, four_s))[1],
        brute_force_ms=brute_ms,
        curve_ms=curve_ms,
        look_up_us=thousand_ms,
        gap=max(abs(a.cost / b.cost - 1.0) for a, b in zip(found, brute, strict=True)),
    )


def brute_force(
    profiles: Sequence[StageProfile], target_s: float, kept: int
) -> list[ConfigurationPath]:
    """The cheapest paths that take less than the target, found by looking at every one."""
    paths = (
        (sum(each.cost for each in choices), sum(each.time_s for each in choices), choices)
        for choices in product(*(each.choices for each in profiles))
    )
    return [
        ConfigurationPath(*each)
        for each in nsmallest(kept, (path for path in paths if path[1] < target_s))
    ]


def _of_level(
    level: LoadLevel,
    assumed: EsgAssumptions,
    many: int | None,
    kept: int = KEPT_PATHS,
    *,
    third_blade: bool = True,
) -> SearchTimes:
    """Every group of every application, at several parts of its target."""
    times = []
    for application in esg_paper().applications:
        for group in distribution(application, assumed).groups:
            profiles = _profiles(group.stages, assumed, many)
            whole_s = group.share * _target_s(application, level)
            for part in _PARTS_OF_TARGET:
                target_s = part * whole_s
                times.append(_search_ms(profiles, target_s, kept, third_blade=third_blade))
    return SearchTimes(tuple(sorted(times)))


def _search_ms(
    profiles: Sequence[StageProfile], target_s: float, kept: int, *, third_blade: bool
) -> float:
    return _timed(lambda: cheapest_paths(profiles, target_s, kept, third_blade=third_blade))[1]


def _target_s(application: Application, level: LoadLevel) -> float:
    return level.slo_of_l * esg_paper().alone_s(application)


def _profiles(
    stages: Sequence[str], assumed: EsgAssumptions, many: int | None
) -> list[StageProfile]:
    profiles = fitted_profiles(assumed)
    return [StageProfile(profiles[stage].choices[:many]) for stage in stages]


def _timed(work: Callable[[], _Found]) -> tuple[_Found, float]:
    started_s = process_time()
    found = work()
    return found, (process_time() - started_s) * 1e3
