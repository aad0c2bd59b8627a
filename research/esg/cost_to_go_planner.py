"""Our rule in the simulation: ESG's lanes, the most urgent first; no groups, no fixed shares."""

from collections.abc import Hashable, Sequence
from functools import cache
from math import ceil

from research.esg.adaptive_planners import MARGIN, AppFunctionLanes, beside_s, largest_batch
from research.esg.applications import Application
from research.esg.cost_to_go import (
    BatchChoices,
    CostToGo,
    WaitingCall,
    batch_choices,
    cost_to_go,
    decide,
    scarcity_prices,
)
from research.esg.fitted_profiles import EsgAssumptions, fitted_profiles
from research.esg.lane_plans import LanePlan, StageCall
from research.esg.node_choice import NodeChoice, NodeRoom, node_for
from research.esg.printed import esg_paper
from research.esg.workflow_run import IntervalForecast
from scheduler.policies.weighing import Prices

# The weight of the latest batch in what later batches are expected to be.
_WEIGHT = 0.05
_LEAST_WAIT_S = 1e-3
# Of a long queue the calls that came first: twice the largest batch.
_MOST_WEIGHED = 32


class CostToGoPlanner(AppFunctionLanes):
    """The first calls are those with the least time to spare; lanes likewise.

    `margin`: as ESG's. `waits`: whether a batch may wait for calls that are expected.
    `scarcity`: whether what is scarce counts as more than its price.
    """

    def __init__(
        self,
        assumed: EsgAssumptions,
        margin: float = MARGIN,
        *,
        waits: bool = False,
        scarcity: bool = True,
    ) -> None:
        self.name = "cost-to-go"
        self._assumed = assumed
        self._margin = margin
        self._waits = waits
        self._scarcity = scarcity
        self._forecasts: dict[Hashable, IntervalForecast] = {}
        self._batches: dict[str, float] = {}
        self._prices = esg_paper().prices

    @property
    def replans(self) -> bool:
        """A plan that found no room is made anew: what is cheapest may have changed."""
        return True

    def arrived(self, call: StageCall, now: float) -> None:
        """Learn how often calls join the lane."""
        self._forecasts.setdefault(self.lane(call), IntervalForecast(_WEIGHT)).observe(now)

    def urgency(self, waiting: Sequence[StageCall], now: float) -> float:
        """The least time to spare."""
        return min(self._spare_s(call, now) for call in waiting[:_MOST_WEIGHED])

    def plan(self, waiting: Sequence[StageCall], now: float) -> LanePlan:
        """Run the best batch of the most urgent calls, or wait for more."""
        function = waiting[0].function
        ordered = self._ordered(waiting[:_MOST_WEIGHED], now)
        node = ordered[0].node
        moved_s = _moved_s(function, self._assumed)
        calls = [
            WaitingCall(
                self._left_s(call, now),
                self._ahead(call),
                moved_s * sum(each not in {None, node} for each in call.inputs),
                moved_s * sum(each is not None for each in call.inputs),
            )
            for call in ordered
        ]
        interval_s = self._forecasts[self.lane(waiting[0])].mean_s if self._waits else None
        decision = decide(_choices(function, self._assumed, self._prices), calls, interval_s)
        if decision.waits:
            assert interval_s is not None
            return LanePlan((), wait_until_s=now + max(interval_s, _LEAST_WAIT_S))
        search_s = self._assumed.enumeration_ms / 1e3
        options = tuple(each.configuration for each in decision.options)
        places = tuple(each.is_local for each in decision.options)
        return LanePlan(options, search_s, calls=tuple(ordered), local=places)

    def place(
        self, plan: LanePlan, function: str, rooms: Sequence[NodeRoom], preferred: int
    ) -> NodeChoice | None:
        """The first option that has room; the batch is remembered."""
        if self._scarcity:
            self._prices = _prices(rooms)
        choice = self._first_fit(plan, rooms, preferred)
        if choice is not None:
            known = self._batches.get(function, 1.0)
            batch = choice.configuration.batch
            self._batches[function] = known + _WEIGHT * (batch - known)
        return choice

    def _first_fit(
        self, plan: LanePlan, rooms: Sequence[NodeRoom], preferred: int
    ) -> NodeChoice | None:
        for configuration, is_local in zip(plan.options, plan.local, strict=True):
            if is_local:
                if rooms[preferred].is_warm and rooms[preferred].fits(configuration):
                    return NodeChoice(configuration, preferred)
                continue
            node = node_for(configuration, rooms, preferred)
            if node is not None:
                return NodeChoice(configuration, node)
        return None

    def _ordered(self, waiting: Sequence[StageCall], now: float) -> list[StageCall]:
        """The most urgent one, then those whose input is on the same node, then all others."""
        spare_s = {id(call): self._spare_s(call, now) for call in waiting}
        first = min(waiting, key=lambda call: spare_s[id(call)])
        return sorted(
            waiting,
            key=lambda call: (call is not first, call.node != first.node, spare_s[id(call)]),
        )

    def _spare_s(self, call: StageCall, now: float) -> float:
        """What is left at the fastest."""
        fastest_s = _fastest_s(call.application, call.stage, self._assumed)
        return self._due_s(call, now, fastest_s) - now - fastest_s

    def _left_s(self, call: StageCall, now: float) -> float:
        """The time for running, without transfers on the same node and searches."""
        fastest_s = _fastest_s(call.application, call.stage, self._assumed)
        search_s = self._assumed.enumeration_ms / 1e3
        beside = beside_s(call.application, call.stage, self._assumed, search_s)
        left_s = self._due_s(call, now, fastest_s) - now - beside
        return left_s / (1.0 + self._margin * self._assumed.noise)

    def _due_s(self, call: StageCall, now: float, fastest_s: float) -> float:
        """Its deadline; for a call that will be late anyway the first multiple that it can meet."""
        over_s = now + fastest_s - call.due_s
        return call.due_s + max(ceil(over_s / call.slo_s), 0) * call.slo_s

    def _ahead(self, call: StageCall) -> CostToGo:
        stages = _path(call.application, call.stage, self._assumed)[1:]
        batches = tuple(largest_batch(int(self._batches.get(each, 1.0) + 0.5)) for each in stages)
        return _to_go(stages, batches, self._assumed, self._prices)


@cache
def _to_go(
    stages: tuple[str, ...], batches: tuple[int, ...], assumed: EsgAssumptions, prices: Prices
) -> CostToGo:
    profiles = fitted_profiles(assumed, prices)
    return cost_to_go([profiles[each].up_to(b) for each, b in zip(stages, batches, strict=True)])


@cache
def _choices(function: str, assumed: EsgAssumptions, prices: Prices) -> BatchChoices:
    return batch_choices(fitted_profiles(assumed, prices)[function])


def _prices(rooms: Sequence[NodeRoom]) -> Prices:
    """What resources are worth with so much of them free."""
    paper, many = esg_paper(), len(rooms)
    vcpus = sum(room.vcpus for room in rooms) / (many * paper.vcpus)
    vgpus = sum(room.vgpus for room in rooms) / (many * paper.vgpus)
    return scarcity_prices(paper.prices, 1.0 - vcpus, 1.0 - vgpus)


@cache
def _moved_s(function: str, assumed: EsgAssumptions) -> float:
    """How much longer an input takes from another node."""
    megabytes = esg_paper().table3[function].input_mb
    return assumed.transfer_s(megabytes, local=False) - assumed.transfer_s(megabytes, local=True)


@cache
def _path(application: Application, stage: int, assumed: EsgAssumptions) -> tuple[str, ...]:
    """The path from a stage to the end that takes longest, at the fastest."""
    profiles = fitted_profiles(assumed)
    fastest_s = {each: profiles[each].choices[0].time_s for each in application.stages}
    return tuple(application.heaviest_path(fastest_s, application.stages[stage]))


@cache
def _fastest_s(application: Application, stage: int, assumed: EsgAssumptions) -> float:
    profiles = fitted_profiles(assumed)
    return sum(profiles[each].choices[0].time_s for each in _path(application, stage, assumed))
