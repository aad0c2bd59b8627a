"""NETGAIN: hits first; a model is loaded where the waiting it saves exceeds what it costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from cache_manager.model import ModelId
from scheduler.errors import BadParameter
from scheduler.policies.base import Decision, Place, RequestView, Skip, SlotView, View


@dataclass(frozen=True, slots=True)
class Policy:
    """Ours. Only the global queue is used; while a GPU is idle and requests wait:

    1. The first request, if `patience` later ones have overtaken it, goes next: nobody starves.
    2. A request whose models are on an idle GPU goes there. But if one whose models are on no GPU
       arrived more than `unheld_s` before it, that one is loaded there first.
    3. Models on no GPU are loaded, the one with most requests per second of work first.
    4. Models held by busy GPUs only are loaded once more where the gain is above zero:
       the wait for the present holders (until the soonest is free, plus `rivals` times the work
       that waits for its other models, plus `backlog` times each holder's share of what waits for
       these) less the load (cheaper by `idle_discount` when all GPUs are idle) less `keeping` times
       the worth of what is evicted. The largest gain goes first, for the youngest request of its
       models: the oldest gets the busy holder soon.
    Loads go to the idle GPU whose victims are worth least. A copy is worth its load time, times
    the requests expected for it within `horizon_s`, times the chance that all others are busy.
    At most `candidates` models and GPUs are weighed against each other.
    """

    patience: int = 300
    unheld_s: float = 6.0
    horizon_s: float = 30.0
    rivals: float = 0.6
    backlog: float = 1.4
    idle_discount: float = 0.4
    keeping: float = 1.0
    candidates: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise BadParameter("netgain", field.name, "must be 0 or more")

    def decide(self, view: View) -> Iterator[Decision]:
        while (head := view.head()) is not None and view.any_idle():
            decisions = (
                self._overdue(view, head)
                or self._hit(view)
                or self._load_unheld(view)
                or self._load_again(view)
            )
            if not decisions:
                return
            yield from decisions

    # -- the four rules, in order ---------------------------------------------------------------

    def _overdue(self, view: View, head: RequestView) -> list[Decision]:
        if not view.visits_reached(head, self.patience):
            return []
        slot = view.idle_holder(head) or self._cheapest(view, head)
        return self._place(view, head, slot, "overtaken too often") if slot is not None else []

    def _hit(self, view: View) -> list[Decision]:
        for hit, slot in view.hits():
            for unheld in view.unheld(1):
                if unheld.arrived_s + self.unheld_s < hit.arrived_s:
                    other = self._cheapest(view, unheld)
                    if other is not None:
                        return self._place(view, unheld, other, "on no GPU, and waits too long")
            return self._place(view, hit, slot, "hit on an idle GPU")
        return []

    def _load_unheld(self, view: View) -> list[Decision]:
        best: tuple[float, RequestView, SlotView] | None = None
        for request in view.unheld(self.candidates):
            slot = self._cheapest(view, request)
            if slot is None:
                continue
            waiting = view.waiting(request)
            work_s = view.load_s(request, slot) + waiting * view.run_s(request, slot)
            if best is None or waiting / work_s > best[0]:
                best = waiting / work_s, request, slot
        if best is None:
            return []
        return self._place(view, best[1], best[2], "on no GPU: most requests per second of work")

    def _load_again(self, view: View) -> list[Decision]:
        best_s = 0.0
        best: tuple[RequestView, SlotView] | None = None
        idle = view.few_idle(self.candidates)
        load_weight = 1.0 - self.idle_discount * view.idle_share()
        for request in view.most_in_excess(self.candidates):
            wait_s = self._wait_for_holders(view, request)
            for slot in idle:
                gain_s = wait_s - load_weight * view.load_s(request, slot)
                if gain_s <= best_s:
                    continue
                victims = view.victims(request, slot)
                if victims is None:
                    continue
                gain_s -= self.keeping * self._worth_s(view, victims)
                if gain_s > best_s:
                    best_s, best = gain_s, (request, slot)
        if best is None:
            return []
        youngest = view.last_like(best[0])
        return self._place(view, youngest, best[1], "one more copy saves more than it costs")

    # -- parts ----------------------------------------------------------------------------------

    def _wait_for_holders(self, view: View, request: RequestView) -> float:
        """How long the last of the requests that want these models would wait with no new copy."""
        holder = view.busy_holder(request)
        if holder is None:
            return 0.0
        before = view.waiting(request) - 1
        own_work_s = before * view.run_s(request, holder) / view.copies(request)
        rivals_s = view.rival_work_s(holder, request)
        return view.wait_s(holder) + self.rivals * rivals_s + self.backlog * own_work_s

    def _cheapest(self, view: View, request: RequestView) -> SlotView | None:
        """The idle GPU whose victims are worth least."""
        best: SlotView | None = None
        best_s = 0.0
        for slot in view.few_idle(self.candidates):
            victims = view.victims(request, slot)
            if victims is None:
                continue
            worth_s = self._worth_s(view, victims)
            if best is None or worth_s < best_s:
                best, best_s = slot, worth_s
        return best

    def _worth_s(self, view: View, victims: Sequence[ModelId]) -> float:
        total_s = 0.0
        for model in victims:
            facts = view.facts(model)
            expected = facts.rate * self.horizon_s
            others = facts.copies - 1
            busy = min(1.0, facts.rate * facts.run_s / others) ** others if others > 0 else 1.0
            total_s += facts.load_s * expected * busy
        return total_s

    def _place(self, view: View, request: RequestView, slot: SlotView, rule: str) -> list[Decision]:
        """Give a request to a slot; whoever waits in front of it was passed over once more."""
        place = Place((request,), slot, rule)
        if request is view.head():
            return [place]
        return [Skip(request, self.patience), place]
