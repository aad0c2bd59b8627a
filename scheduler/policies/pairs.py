"""PAIRS: where leases run at once, the request goes beside what it disturbs least."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.policies.placement_policy import Decision, Place, check_bounds
from scheduler.policies.weighing import CANDIDATES

# The largest mean slowdown of a pair: from there on one after the other is as fast.
_MOST_SLOWDOWN = 2.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Greedy by predicted interference, after Kim and Kim (2020), one placement at a time.

    Only the global queue is used; while a GPU has room and requests wait:

    1. The first request goes next once `patience` later ones for each slot have overtaken it.
    2. Of the oldest requests of at most 8 sets of models, and for each of them the idle
       GPU that holds its models and the least used ones with room, the pair goes first whose value
       is least: the mean of how many times as long the request runs beside what runs there, and
       what runs there beside the request, plus the deviation |a/b - b/a| of the two, plus
       the part of its time there that a load would take. Alone the two are 1.
    A request does not go where that mean exceeds 2, where one after the other is as fast; nor
    to a GPU that has to load its models, if a busy one that has them is free sooner.

    How unclear points were read: the paper takes pairs for empty GPUs, and the next pair when both
    have ended. Requests come one by one, so an empty GPU gets one at once, mostly the oldest, and
    its partner is chosen when it is there.
    """

    patience: Annotated[int, "how many later requests for each slot may overtake the first"] = 25

    def __post_init__(self) -> None:
        check_bounds("pairs", self)

    def decide(self, view: View) -> Iterator[Decision]:
        while view.any_idle() and (head := view.first()) is not None:
            decision = self._overdue(view, head) or self._least_disturbing(view)
            if decision is None:
                return
            yield decision

    def _overdue(self, view: View, head: Pending) -> Place | None:
        if view.overtaken(head) < self.patience * view.slot_count():
            return None
        slots = self._slots(view, head)
        best = min(slots, key=lambda slot: self._value(view, head, slot), default=None)
        return None if best is None else Place((head,), best, "overtaken too often")

    def _least_disturbing(self, view: View) -> Place | None:
        best: tuple[Pending, Slot] | None = None
        best_value = 0.0
        for request in view.oldest(CANDIDATES):
            for slot in self._slots(view, request):
                value = self._value(view, request, slot)
                if best is not None and value >= best_value:
                    continue
                if self._waits(view, request, slot):
                    continue
                best, best_value = (request, slot), value
        if best is None:
            return None
        return Place((best[0],), best[1], "disturbs least and is disturbed least there")

    # -- parts ----------------------------------------------------------------------------------

    def _slots(self, view: View, request: Pending) -> list[Slot]:
        slots = list(view.few_idle(request, CANDIDATES))
        holder = view.idle_holder(request)
        if holder is not None and holder not in slots:
            slots.insert(0, holder)
        return slots

    def _value(self, view: View, request: Pending, slot: Slot) -> float:
        own, others = view.slowdown(request, slot), view.slows(request, slot)
        value = (own + others) / 2 + abs(own / others - others / own)
        load_s = view.load_s(request, slot)
        if load_s > 0.0:
            value += load_s / (load_s + view.run_s(request, slot))
        return value

    def _waits(self, view: View, request: Pending, slot: Slot) -> bool:
        """Whether the request is better not placed there now."""
        own, others = view.slowdown(request, slot), view.slows(request, slot)
        if (own + others) / 2 > _MOST_SLOWDOWN:
            return True
        if slot.holds(request.models):
            return False
        busy = view.busy_holder(request)
        return busy is not None and view.begins_s(request, busy) < view.load_s(request, slot)
