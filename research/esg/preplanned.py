"""Schedulers that plan all stages before the first one: Orion and Aquatope."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from math import inf, sqrt

from research.esg.adaptive_planners import AppFunctionLanes, largest_batch
from research.esg.applications import Application
from research.esg.bayesian_search import learned
from research.esg.fitted_profiles import (
    BATCHES,
    VCPUS,
    VGPUS,
    EsgAssumptions,
    fitted_profiles,
)
from research.esg.lane_plans import LanePlan, StageCall
from scheduler.model.values import Configuration

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
