"""What copies of models are worth, and what waits for them: terms that weighing policies share."""

from collections.abc import Sequence
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from scheduler.policies.placement_policy import ModelFacts, RequestView, SlotView, View

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
        """All of them together."""
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
    request: RequestView,
    holder: SlotView,
    begins_s: float,
) -> float:
    """How long the last of the requests for these models would wait for this busy holder.

    It could begin one in `begins_s`.
    """
    before = view.waiting(request) - 1
    own_work_s = before * view.run_s(request, holder) / view.copies(request)
    rivals_s = view.rival_work_s(holder, request)
    return begins_s + _RIVALS * rivals_s + _BACKLOG * own_work_s


def neighbours_s(view: View, request: RequestView, slot: SlotView) -> float:
    """What a request and the runs on a slot lose together if it runs beside them."""
    slowdown = view.slowdown(request, slot)
    own_s = view.run_s(request, slot) * (1.0 - 1.0 / slowdown) if slowdown > 1.0 else 0.0
    return own_s + view.disturbs(request, slot)


def _all_others_busy(facts: ModelFacts) -> float:
    others = facts.copies - 1
    return min(1.0, facts.rate * facts.run_s / others) ** others if others > 0 else 1.0
