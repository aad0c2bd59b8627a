"""What several policies weigh: copies of models, waits for them, batches of requests."""

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import GpuRoom, ModelFacts, View
from scheduler.model.values import Configuration

_HOUR_S = 3600.0


class Choice(NamedTuple):
    """A configuration of one stage: its time, and its cost for each request of the batch."""

    time_s: float
    cost: float
    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour of one vCPU and one vGPU costs."""

    vcpu_hour: float
    vgpu_hour: float

    def cost(self, configuration: Configuration, held_s: float) -> float:
        rate = configuration.vcpus * self.vcpu_hour + configuration.vgpus * self.vgpu_hour
        return rate * held_s / _HOUR_S


class StageProfile:
    """All choices for a stage, the fastest first; equally fast ones by cost, then by resources."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self.choices = tuple(sorted(choices))

    def up_to(self, batch: int) -> "StageProfile":
        """The choices with at most this batch."""
        return StageProfile(c for c in self.choices if c.configuration.batch <= batch)


def profile(times_s: Mapping[Configuration, float], prices: Prices) -> StageProfile:
    return StageProfile(
        Choice(time_s, prices.cost(each, time_s) / each.batch, each)
        for each, time_s in times_s.items()
    )


def undominated(choices: Iterable[Choice], many: int = 1) -> list[Choice]:
    """Those to which fewer than `many` others are at once as fast and as cheap, fastest first.

    Of the `many` cheapest ways to do all stages in a given time, none needs another choice.
    """
    kept: list[Choice] = []
    lowest = [inf] * many  # the lowest costs of those kept, ascending
    for choice in sorted(choices):
        if choice.cost < lowest[-1]:
            kept.append(choice)
            insort(lowest, choice.cost)
            lowest.pop()
    return kept


# The prices of a vCPU and a slot for an hour, as in ESG: only their ratio decides.
PRICES = Prices(vcpu_hour=0.034, vgpu_hour=0.67)
# The time of a request that brings none, in runs of it alone.
_SLO_RUNS = 5.0
# A time that was measured as nothing.
_LEAST_S = 1e-9
# A missed deadline counts as so many times what a request costs, alone, at its cheapest.
MISS_WORTH = 20.0
_MOST_OPTIONS = 12
# From this part of a resource in use on, it counts as so many times its price.
_SCARCITY = ((0.95, 12.0), (0.85, 4.0), (0.0, 1.0))


def members_of(view: View, first: Pending, most_batch: int) -> list[Pending]:
    """The oldest requests of its queue, if it is the oldest; a younger one goes alone."""
    if most_batch <= 1:
        return [first]
    like = view.waiting_like(first, 2 * most_batch)
    if not like or like[0] is not first:
        return [first]
    kind = stage_of(first)
    return [pending for pending in like if stage_of(pending) == kind][:most_batch]


def stage_of(pending: Pending) -> tuple[str, str, str]:
    """Requests of the same models run together if they have the same function and stage."""
    request = pending.request
    return request.function, request.application, request.stage


def fits(room: GpuRoom, given: Configuration) -> bool:
    return given.vgpus <= len(room.idle) and (not room.vcpus or given.vcpus <= room.free_vcpus)


def scarce_prices(view: View, rooms: Sequence[GpuRoom]) -> Prices:
    """vCPUs of these GPUs, and slots, count as dearer where they run out."""
    vcpus, free = sum([room.vcpus for room in rooms]), sum([room.free_vcpus for room in rooms])
    used = 1.0 - free / vcpus if vcpus else 0.0
    busy = 1.0 - max(0.0, view.idle_share())
    return Prices(PRICES.vcpu_hour * _times(used), PRICES.vgpu_hour * _times(busy))


def _times(used: float) -> float:
    for least, times in _SCARCITY:
        if used >= least:
            return times
    return 1.0


def slack_s(view: View, request: Pending, slot: Slot) -> float:
    """What is left of a request's time: of five runs of it alone here, if it brings none."""
    slo_s = request.request.slo_s
    if slo_s is None:
        slo_s = _SLO_RUNS * view.run_s(request, slot)
    return slo_s - (view.now - request.arrived_s)


def profile_of(
    view: View, first: Pending, rooms: Sequence[GpuRoom], most_batch: int, prices: Prices
) -> StageProfile:
    """The times and costs of all configurations that one of these GPUs could have, if empty."""
    slot = rooms[0].idle[0]
    slots = max([room.slots for room in rooms])
    vcpus = max([room.vcpus for room in rooms]) or 1
    wanted = [Configuration(batch, 1, vgpus) for batch, vgpus in _shapes(most_batch, slots)]
    for measured in view.measured(first, slot):
        has_room = measured.vcpus <= vcpus and measured.vgpus <= slots
        if measured.batch <= most_batch and has_room and measured not in wanted:
            wanted.append(measured)
    return profile(
        {each: max(_LEAST_S, view.configured_s(first, slot, each)) for each in wanted}, prices
    )


class BatchOption(NamedTuple):
    """A configuration for the first of some requests, near their data or elsewhere."""

    configuration: Configuration
    is_near: bool


def batch_options(
    stage: StageProfile, lefts_s: Sequence[float], away_s: float = 0.0
) -> list[BatchOption]:
    """What to run of these requests, the first ones together: what costs each least comes first.

    `lefts_s` is the time that each request has; away from its data it takes `away_s` more.
    """
    by_batch: dict[int, list[Choice]] = {}
    for choice in stage.choices:
        by_batch.setdefault(choice.configuration.batch, []).append(choice)
    alone = min([choice.cost for choice in by_batch[min(by_batch)]])
    options = []
    for batch, choices in by_batch.items():
        if batch > len(lefts_s):
            continue
        left_s = min(lefts_s[:batch])
        for choice in undominated(choices):
            for is_far, moved_s in ((False, 0.0), (True, batch * away_s)):
                cost = batch_cost(choice, left_s, moved_s, alone, MISS_WORTH)
                options.append((cost, is_far, choice.configuration))
    options.sort()
    return [BatchOption(given, not is_far) for _, is_far, given in options[:_MOST_OPTIONS]]


def batch_cost(
    choice: Choice, left_s: float, moved_s: float, alone: float, miss_worth: float
) -> float:
    """What a batch that has so much time, and takes `moved_s` more, costs each of its requests."""
    takes_s = choice.time_s + moved_s
    cost = choice.cost * takes_s / choice.time_s
    if takes_s < left_s:
        return cost
    return cost + miss_worth * (1.0 + (takes_s - left_s) / takes_s) * alone


def _shapes(most_batch: int, slots: int) -> Iterator[tuple[int, int]]:
    """Batches and slots to choose from: a portion of a batch has at least one request."""
    batch = 1
    while batch <= most_batch:
        vgpus = 1
        while vgpus <= min(batch, slots):
            yield batch, vgpus
            vgpus = slots if vgpus < slots < 2 * vgpus and slots <= batch else 2 * vgpus
        batch *= 2


# A decision costs the same at every size: at most so many models and GPUs are weighed.
CANDIDATES = 8
# The seconds that a request's data takes from the node that it names.
AWAY_S = 0.02
# How much cheaper a load is while all slots are idle: compute that nobody needs now.
IDLE_DISCOUNT = 0.4
# The weights of the work that waits for the other models on a busy holder, and of a holder's share
# of what waits for the same models: the sweeps of decision 3 chose both.
_RIVALS = 0.6
_BACKLOG = 1.4
# Over how many loads' worth of inference a copy is expected to pay.
_LOADS_WORTH = 16.0


class Gain(NamedTuple):
    """The seconds that an action gains over none, by reason; what it costs is below zero."""

    waiting: float = 0.0
    coming: float = 0.0
    load: float = 0.0
    victims: float = 0.0
    data: float = 0.0
    neighbours: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def named(self) -> dict[str, float]:
        """Those that are not 0, by name."""
        named = zip(self._fields, self, strict=True)
        return {name: seconds for name, seconds in named if seconds}


def worth_s(view: View, models: Sequence[ModelId]) -> float:
    """What these copies are worth, in seconds: what their loss is expected to cost.

    A copy is worth its load, times the requests expected while 16 such loads' worth of
    inference runs, times the chance that all other copies are busy.
    """
    total_s = 0.0
    for model in models:
        facts = view.facts(model)
        expected = _LOADS_WORTH * facts.rate * facts.load_s / max(facts.run_s, 1e-6)
        total_s += facts.load_s * expected * _all_others_busy(facts)
    return total_s


def reloads(view: View, models: Sequence[ModelId]) -> float:
    """How many requests would wait for loads at a time, on average, if these copies were lost.

    Those that come during one load, times the chance that all other copies are busy.
    """
    total = 0.0
    for model in models:
        facts = view.facts(model)
        total += facts.rate * facts.load_s * _all_others_busy(facts)
    return total


def wait_at_s(
    view: View,
    request: Pending,
    holder: Slot,
    begins_s: float,
) -> float:
    """How long the last of the requests for these models would wait for this busy holder.

    It could begin one in `begins_s`.
    """
    before = view.waiting(request) - 1
    own_work_s = before * view.run_s(request, holder) / view.copies(request)
    rivals_s = view.rival_work_s(holder, request)
    return begins_s + _RIVALS * rivals_s + _BACKLOG * own_work_s


def neighbours_s(view: View, request: Pending, slot: Slot) -> float:
    """What a request and the runs on a slot lose together if it runs beside them."""
    if not slot.at_once:
        return 0.0
    slowdown = view.slowdown(request, slot)
    own_s = view.run_s(request, slot) * (1.0 - 1.0 / slowdown) if slowdown > 1.0 else 0.0
    return own_s + view.disturbs(request, slot)


def _all_others_busy(facts: ModelFacts) -> float:
    others = facts.copies - 1
    return min(1.0, facts.rate * facts.run_s / others) ** others if others > 0 else 1.0
