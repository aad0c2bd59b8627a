"""BESIDE: hits first; models are loaded beside the runs of others, where that gains most."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.policies.placement_policy import Decision, Place, check_bounds
from scheduler.policies.weighing import CANDIDATES, reloads, wait_at_s

# Over how many loads' time a copy is expected to pay, and the weight of what the loss of the
# victims costs, for a further copy: decision 32 has the sweep.
_HORIZON = 24.0
_RENT = 2.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Ours. A GPU computes and copies at the same time: no load takes its compute from others.

    Only the global queue is used. While requests wait, and a GPU is idle or loads nothing:

    1. The first request goes next once `patience` later ones for each slot have overtaken it,
       unless a busy GPU has its models: there it is the first one anyway.
    2. A request whose models are all on an idle GPU goes there: the least used such GPU, the
       first such request.
    3. Models that no GPU holds are loaded, those of the oldest request first, unless the only copy
       of what requests wait for would have to leave: these run first.
    4. Models that only busy GPUs hold, or that are on their way, are loaded once more where that
       gains something. Now: the wait for the holder that could begin soonest, plus 0.6 times
       the work that waits for the other models there, plus 1.4 times a holder's share of
       what waits for these; less the time until the new copy could run. And over the time of
       24 loads: as many requests as come for these models save the new copy's share of
       such a wait; less 2 times the loads that the victims' requests wait for instead. The
       largest gain goes first, and for the youngest request of its models, since the oldest one
       will get the holder that comes free.
    A load goes beside the runs of a GPU that loads nothing, idle or not, where it costs least: the
    loads that the victims' requests wait for over the same time, and the time until the load has
    ended and the compute is free. At most 8 models and GPUs are weighed.
    """

    patience: Annotated[int, "how many later requests for each slot may overtake the first"] = 25

    def __post_init__(self) -> None:
        check_bounds("beside", self)

    def decide(self, view: View) -> Iterator[Decision]:
        while (view.any_idle() or view.any_loadable()) and (head := view.first()) is not None:
            decision = self._overdue(view, head) or self._hit(view)
            if decision is None and view.any_loadable():
                decision = self._load_unheld(view) or self._load_again(view)
            if decision is None:
                return
            yield decision

    # -- the four rules, in order ---------------------------------------------------------------

    def _overdue(self, view: View, head: Pending) -> Place | None:
        if view.overtaken(head) < self.patience * view.slot_count():
            return None
        slot = view.idle_holder(head)
        if slot is not None:
            return Place((head,), slot, "overtaken too often")
        if view.busy_holder(head) is not None:
            return None
        slot = self._cheapest(view, head, spare=False)
        if slot is None:
            return None
        return Place((head,), slot, "overtaken too often", beside=True)

    def _hit(self, view: View) -> Place | None:
        for hit, slot in view.hits():
            return Place((hit,), slot, "hit on an idle GPU")
        return None

    def _load_unheld(self, view: View) -> Place | None:
        for request in view.unheld(CANDIDATES):
            slot = self._cheapest(view, request, spare=True)
            if slot is not None:
                return Place((request,), slot, "on no GPU", beside=True)
        return None

    def _load_again(self, view: View) -> Place | None:
        best_s = 0.0
        best: tuple[Pending, Slot] | None = None
        for request in view.most_in_excess(CANDIDATES):
            horizon_s = _HORIZON * view.nearest_load_s(request)
            saved_s = self._saved_s(view, request, horizon_s)
            if saved_s - view.nearest_load_s(request) <= best_s:
                continue
            for slot in view.few_loadable(request, CANDIDATES):
                gain_s = saved_s - max(view.load_s(request, slot), view.wait_s(slot))
                if gain_s <= best_s or slot.holds(request.models):
                    continue
                victims = view.victims(request, slot)
                gain_s -= _RENT * horizon_s * reloads(view, victims)
                if gain_s > best_s and not view.strands(slot, victims):
                    best_s, best = gain_s, (request, slot)
        if best is None:
            return None
        youngest = view.last_like(best[0])
        return Place((youngest,), best[1], "one more copy saves more than it costs", beside=True)

    # -- parts ----------------------------------------------------------------------------------

    def _saved_s(self, view: View, request: Pending, horizon_s: float) -> float:
        """What the last of the waiting requests and those to come would wait without a new copy."""
        holder = view.busy_holder(request)
        if holder is None:
            return 0.0
        begins_s = view.begins_s(request, holder)
        wait_s = wait_at_s(view, request, holder, begins_s)
        coming = horizon_s * min([view.facts(model).rate for model in request.models])
        return wait_s + coming * wait_s / (view.copies(request) + 1)

    def _cheapest(self, view: View, request: Pending, *, spare: bool) -> Slot | None:
        """The GPU, idle or not, where a load costs others least and is of use soonest."""
        horizon_s = _HORIZON * view.nearest_load_s(request)
        few = view.few_loadable(request, CANDIDATES)
        victims = {slot: view.victims(request, slot) for slot in few}

        def cost_s(slot: Slot) -> float:
            usable_s = max(view.wait_s(slot), view.load_s(request, slot))
            return usable_s + horizon_s * reloads(view, victims[slot])

        slots = [slot for slot in few if not (spare and view.strands(slot, victims[slot]))]
        return min(slots, key=cost_s, default=None)
