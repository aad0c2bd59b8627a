"""NETGAIN: hits first; a model is loaded where the waiting it saves exceeds what it costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.policies.placement_policy import Decision, Place, check_bounds
from scheduler.policies.weighing import (
    AWAY_S,
    CANDIDATES,
    IDLE_DISCOUNT,
    wait_at_s,
    worth_s,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Ours. Only the global queue is used; while a GPU is idle and requests wait:

    1. The first request goes next once `patience` later ones for each slot have overtaken it.
       The first has always been overtaken most, so that no request is overtaken more often.
    2. A request whose models are all on an idle GPU goes there: the least used such GPU, the
       first such request.
    3. Models that no GPU holds are loaded, those of the oldest request first.
    4. Models that only busy GPUs hold are loaded once more where that gains something:
       the wait for the soonest free holder, plus 0.6 times the work that waits for the other
       models there, plus 1.4 times a holder's share of what waits for these,
       less the load (up to 0.4 cheaper, with the share of GPUs that are idle),
       less the worth of what is evicted. The largest gain goes first, and for the youngest
       request of its models, since the oldest one will get the holder that comes free.
    Loads go to the idle GPU where the load and the worth of its victims are least; away from the
    node that a request names, where its data is, a GPU costs it 20 ms more, and of idle
    GPUs with a hit one of that node goes first. A copy is worth its load, times the
    requests expected while 16 such loads' worth of inference runs, times the chance that
    all other copies are busy. At most 8 models and GPUs are weighed.
    """

    patience: Annotated[int, "how many later requests for each slot may overtake the first"] = 25

    def __post_init__(self) -> None:
        check_bounds("netgain", self)

    def decide(self, view: View) -> Iterator[Decision]:
        while view.any_idle() and (head := view.first()) is not None:
            decision = (
                self._overdue(view, head)
                or self._hit(view)
                or self._load_unheld(view)
                or self._load_again(view)
            )
            if decision is None:
                return
            yield decision

    # -- the four rules, in order ---------------------------------------------------------------

    def _overdue(self, view: View, head: Pending) -> Place | None:
        if view.overtaken(head) < self.patience * view.slot_count():
            return None
        slot = view.idle_holder(head) or self._cheapest(view, head)
        return Place((head,), slot, "overtaken too often") if slot is not None else None

    def _hit(self, view: View) -> Place | None:
        for hit, slot in view.hits():
            holder = next(iter(view.near_holders(hit)), slot)
            return Place((hit,), holder, "hit on an idle GPU")
        return None

    def _load_unheld(self, view: View) -> Place | None:
        for request in view.unheld(CANDIDATES):
            slot = self._cheapest(view, request)
            if slot is not None:
                return Place((request,), slot, "on no GPU")
        return None

    def _load_again(self, view: View) -> Place | None:
        best_s = 0.0
        best: tuple[Pending, Slot] | None = None
        load_weight = 1.0 - IDLE_DISCOUNT * view.idle_share()
        for request in view.most_in_excess(CANDIDATES):
            wait_s = self._wait_for_holders(view, request)
            if wait_s - load_weight * view.nearest_load_s(request) <= best_s:
                continue
            for slot in view.few_idle(request, CANDIDATES):
                gain_s = wait_s - load_weight * view.load_s(request, slot)
                if gain_s > best_s:
                    gain_s -= worth_s(view, view.victims(request, slot))
                if gain_s > best_s:
                    best_s, best = gain_s, (request, slot)
        if best is None:
            return None
        youngest = view.last_like(best[0])
        return Place((youngest,), best[1], "one more copy saves more than it costs")

    # -- parts ----------------------------------------------------------------------------------

    def _wait_for_holders(self, view: View, request: Pending) -> float:
        """How long the last of the requests for these models would wait with no new copy."""
        holder = view.busy_holder(request)
        if holder is None:
            return 0.0
        begins_s = view.wait_s(holder)
        return wait_at_s(view, request, holder, begins_s)

    def _cheapest(self, view: View, request: Pending) -> Slot | None:
        """The idle GPU where the load, its victims' worth and the way to the data cost least."""
        near = view.near_idle(request)

        def cost_s(slot: Slot) -> float:
            load_s = view.load_s(request, slot)
            away_s = AWAY_S if near and slot not in near else 0.0
            return load_s + worth_s(view, view.victims(request, slot)) + away_s

        few = view.few_idle(request, CANDIDATES)
        slots = dict.fromkeys((*near, *view.idle_keepers(request), *few))
        return min(slots, key=cost_s, default=None)
