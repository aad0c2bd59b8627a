"""Our rule for workflows: run what costs least for each call until its workflow ends.

The cost to go of a call is what its remaining stages cost at least within the time that it has
left, a step function known beforehand. A batch is worth its own cost plus the cost to go of each
member after it; a member that would then be late counts as much as a deadline is worth. So one
number weighs batching, deadlines and (by what the way to a node takes) locality; and whether to
wait for more calls is asked of the same number, with the calls that are expected by then.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from scheduler.model.values import Configuration
from scheduler.policies.weighing import Choice, Prices, StageProfile, undominated

# A missed deadline counts as so many times what the call costs, alone, at its cheapest.
MISS_WORTH = 20.0
# Waiting must save this part of the cost, or it is not worth the uncertainty.
LEAST_SAVED = 0.02
MOST_OPTIONS = 12
# From this part of a resource in use on, it counts as so many times its price.
SCARCITY = ((0.95, 12.0), (0.85, 4.0), (0.0, 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class CostToGo:
    """What the stages ahead cost at least, by the time that is left for them."""

    times_s: tuple[float, ...]
    costs: tuple[float, ...]

    def within(self, left_s: float) -> float:
        """The least cost within this time; infinite where no choice is fast enough."""
        place = bisect_left(self.times_s, left_s)
        return self.costs[place - 1] if place else inf

    @property
    def least(self) -> float:
        return self.costs[-1]


def cost_to_go(stages: Sequence[StageProfile]) -> CostToGo:
    """The cost to go through these stages; nothing is left to pay after the last one."""
    ways = [(0.0, 0.0)]
    for stage in stages:
        longer = (
            (time_s + choice.time_s, cost + choice.cost)
            for time_s, cost in ways
            for choice in undominated(stage.choices)
        )
        ways = list(_ever_cheaper(sorted(longer)))
    times_s, costs = zip(*ways, strict=True)
    return CostToGo(times_s, costs)


def _ever_cheaper(ways: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Of ways by time those that cost less than all faster ones."""
    lowest = inf
    for time_s, cost in ways:
        if cost < lowest:
            lowest = cost
            yield time_s, cost


def scarcity_prices(prices: Prices, vcpus_used: float, vgpus_used: float) -> Prices:
    """What resources are worth while these parts of the cluster's are in use.

    The bill knows one price; where vCPUs run out, a configuration with fewer lets more calls run.
    """
    return Prices(prices.vcpu_hour * _times(vcpus_used), prices.vgpu_hour * _times(vgpus_used))


def _times(used: float) -> float:
    return next(times for least, times in SCARCITY if used >= least)


class WaitingCall(NamedTuple):
    """The time that a call has for this stage and all after it, and what comes after this one.

    `local_s`: how much longer its batch takes for its input on the preferred node, and `remote_s`
    on any other one.
    """

    left_s: float
    ahead: CostToGo
    local_s: float = 0.0
    remote_s: float = 0.0


class BatchOption(NamedTuple):
    """A configuration for the first calls, on the preferred node or on others."""

    configuration: Configuration
    is_local: bool


class BatchDecision(NamedTuple):
    """What to run now, the best first, each with the first calls of the list; or none: wait."""

    options: tuple[BatchOption, ...]
    waits: bool


class _Member(NamedTuple):
    """Calls with one future: how many, and the least time that any of them has."""

    many: int
    left_s: float
    ahead: CostToGo


class _Batch(NamedTuple):
    """The members of a batch, and how long their inputs take, on the preferred node or not."""

    members: list[_Member]
    local_s: float
    remote_s: float


BatchChoices = Mapping[int, Sequence[Choice]]


def batch_choices(stage: StageProfile) -> BatchChoices:
    """The choices of a stage by batch, without those that another one beats in time and cost."""
    by_batch: dict[int, list[Choice]] = {}
    for choice in stage.choices:
        by_batch.setdefault(choice.configuration.batch, []).append(choice)
    return {batch: undominated(choices) for batch, choices in sorted(by_batch.items())}


def decide(
    choices: BatchChoices,
    waiting: Sequence[WaitingCall],
    interval_s: float | None,
) -> BatchDecision:
    """Run some of these calls now, or wait for the next ones, which come at this interval.

    The calls are ordered: those of a batch are the first ones.
    """
    alone = min(choice.cost for choice in choices[min(choices)])
    now = sorted(
        (
            _worth(choice, batch.members, moved_s, alone, MISS_WORTH),
            not is_local,
            choice.configuration,
        )
        for size, its_choices in choices.items()
        if size <= len(waiting)
        for batch in (_batch(waiting[:size]),)
        for is_local, moved_s in ((True, batch.local_s), (False, batch.remote_s))
        for choice in its_choices
    )
    if interval_s is not None:
        later = _least_later(choices, waiting, interval_s, alone)
        if later < now[0][0] * (1.0 - LEAST_SAVED):
            return BatchDecision((), waits=True)
    return BatchDecision(
        tuple(BatchOption(each, not far) for _, far, each in now[:MOST_OPTIONS]), waits=False
    )


def worth_of(
    choice: Choice, calls: Sequence[WaitingCall], miss_worth: float, alone: float
) -> float:
    """What a choice on the preferred node costs each of these calls, missed deadlines included."""
    batch = _batch(calls)
    return _worth(choice, batch.members, batch.local_s, alone, miss_worth)


def _batch(calls: Iterable[WaitingCall]) -> _Batch:
    members: dict[CostToGo, _Member] = {}
    all_local_s, all_remote_s = 0.0, 0.0
    for left_s, ahead, local_s, remote_s in calls:
        all_local_s += local_s
        all_remote_s += remote_s
        member = members.get(ahead)
        members[ahead] = (
            _Member(1, left_s, ahead)
            if member is None
            else _Member(member.many + 1, min(member.left_s, left_s), ahead)
        )
    return _Batch(list(members.values()), all_local_s, all_remote_s)


def _least_later(
    choices: BatchChoices,
    calls: Sequence[WaitingCall],
    interval_s: float,
    alone: float,
) -> float:
    """The lowest worth of a batch that is larger than all that wait, when it has filled."""
    best = inf
    fresh = max(calls, key=lambda call: call.left_s)
    for size, its_choices in choices.items():
        more = size - len(calls)
        if more <= 0:
            continue
        waited_s = more * interval_s
        batch = _batch(call._replace(left_s=call.left_s - waited_s) for call in calls)
        batch.members.append(_Member(more, fresh.left_s, fresh.ahead))
        moved_s = batch.local_s
        worths = (_worth(c, batch.members, moved_s, alone, MISS_WORTH) for c in its_choices)
        best = min(best, *worths)
    return best


def _worth(
    choice: Choice, members: Iterable[_Member], moved_s: float, alone: float, miss_worth: float
) -> float:
    """The cost for each call of the batch, to the end of its workflow."""
    takes_s = choice.time_s + moved_s
    cost = choice.cost * takes_s / choice.time_s
    total, many = 0.0, 0
    for its_many, left_s, ahead in members:
        many += its_many
        rest = ahead.within(left_s - takes_s)
        if rest == inf:
            fastest_s = takes_s + ahead.times_s[0]
            late = 1.0 + (fastest_s - left_s) / fastest_s
            rest = ahead.least + miss_worth * late * (ahead.least + alone)
        total += its_many * rest
    return cost + total / many
