"""TOGO: NETGAIN says what goes where; batches are those that cost least for each request."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Annotated

from scheduler.cluster.view import View
from scheduler.policies import netgain
from scheduler.policies.placement_policy import Decision, Place, check_bounds
from scheduler.policies.weighing import (
    batch_options,
    fits,
    members_of,
    profile_of,
    scarce_prices,
    slack_s,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Ours. NETGAIN, for batches on parts of GPUs, with time budgets.

    1. NETGAIN decides which request goes where: hits first, a load where it gains most, and nobody
       is overtaken by more than `patience` later requests for each slot.
    2. Requests of the same function, application, stage and models join the oldest of them in the
       batch and configuration that cost least for each: its vCPUs and slots for its time, and 20
       times what the request costs alone if it would be later than its time
       (`weighing.py`). Of one that is late already only the cost counts.
    vCPUs and slots count as dearer where they run out. Where one request alone on one slot costs
    least, all is as under NETGAIN.
    """

    most_batch: Annotated[int, "how many requests run together at most"] = 16
    patience: Annotated[int, "how many later requests for each slot may overtake the first"] = 25

    def __post_init__(self) -> None:
        check_bounds("togo", self, "most_batch")

    def decide(self, view: View) -> Iterator[Decision]:
        for decision in netgain.Policy(patience=self.patience).decide(view):
            yield self._widened(view, decision) if isinstance(decision, Place) else decision

    def _widened(self, view: View, decision: Place) -> Place:
        first, slot = decision.requests[0], decision.slot
        members = members_of(view, first, self.most_batch)
        room = view.room(slot)
        prices = scarce_prices(view, (room,))
        profile = profile_of(view, first, (room,), len(members), prices)
        if len(profile.choices) == 1:
            return decision
        left_s = [slack_s(view, member, slot) for member in members]
        for option in batch_options(profile, [left if left > 0.0 else inf for left in left_s]):
            given = option.configuration
            if not fits(room, given):
                continue
            if given.batch == given.vgpus == given.vcpus == 1:
                break
            more = [other for other in room.idle if other is not slot][: given.vgpus - 1]
            rule = f"{decision.rule}, as a batch"
            return Place(tuple(members[: given.batch]), slot, rule, given, more)
        return decision
