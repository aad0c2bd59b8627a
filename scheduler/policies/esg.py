"""ESG: batches in the cheapest configuration that ends in time; home GPU, then warm, then cold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import GpuRoom, View
from scheduler.model.errors import BadParameter
from scheduler.model.values import Configuration
from scheduler.policies.placement_policy import Decision, Place, Prefetch, Skip, Wake, check_bounds
from scheduler.policies.weighing import (
    CANDIDATES,
    PRICES,
    Choice,
    fits,
    profile_of,
    slack_s,
    stage_of,
    undominated,
)

# Where a GPU's leases are given no vCPUs, they are no reason against it.
_VCPUS_FREE = 1 << 30
# A batch must be dearer by more than this, for each request, before more calls are of no use.
_DEARER = 1e-9
# The paper's: how many configurations are tried (K), and rounds without room before the least one.
_KEPT = 5
_ROUNDS = 3


class _Plan(NamedTuple):
    """What to try for a queue, in this order; or until when to wait for more calls."""

    configurations: Sequence[Configuration]
    wake_s: float | None
    rule: str


class _StageQueue(NamedTuple):
    """Waiting requests of one function, application's stage and models, the oldest first.

    `slack_s` is what is left of the oldest one's time, below zero if it is late.
    """

    members: Sequence[Pending]
    slack_s: float


@dataclass(frozen=True, slots=True)
class Policy:
    """ESG_1Q and ESG_Dispatch (Hui et al., HPDC 2024: appendix B, section 3.4).

    Waiting requests of one function, application's stage and models are a queue; those of no
    workflow are one-stage workflows. Queues are served by their oldest requests, each as a batch:

    1. The cheapest five configurations (batch, vCPUs, slots) that end within what is left of the
       oldest request's time are tried in order; where none is in time, the fastest (with `late`
       the cheapest). A workflow's
       division among its stages is done before: a request brings the time of its own stage.
    2. A configuration goes to the home node (the one that the request names, where the stage
       before it ran, else always the same for a stage) if the models are there, then to an idle
       GPU that has them, then to the one with the most room.
    3. What found no room in three rounds takes the least configuration.
    4. The first request goes next once `patience` later ones for each slot have overtaken it.
    With `fill_share` a batch waits for more calls, as long as more are not dearer, no
    longer than the oldest request's time allows. When nothing waits, and the next request for
    what was just placed is expected before a GPU that has it is free, it is loaded once more,
    where nothing has to leave.

    How unclear points were read: a configuration's time is the measured one; else the one of the
    largest portion of the batch on one slot, whatever the vCPUs (section 3.2). Loads are no part
    of the target. The interval between requests is that of the models, not of the function.
    """

    most_batch: Annotated[int, "how many requests run together at most"] = 16
    fill_share: Annotated[float, "which part of its oldest request's spare time it may wait"] = 0.0
    late: Annotated[int, "1: what is late anyway takes the cheapest configuration"] = 0
    patience: Annotated[int, "how many later requests for each slot may overtake the first"] = 25

    def __post_init__(self) -> None:
        check_bounds("esg", self, "most_batch")
        if self.fill_share > 1.0:
            raise BadParameter("esg", "fill_share", "must be 1 or less")

    def decide(self, view: View) -> Iterator[Decision]:
        placed: list[tuple[Pending, Slot]] = []
        while view.any_idle() and (head := view.first()) is not None:
            overdue = self._overdue(view, head)
            decisions = [overdue] if overdue is not None else self._round(view)
            yield from decisions
            last = decisions[-1] if decisions else None
            if not isinstance(last, Place):
                break
            placed.append((last.requests[0], last.slot))
        if placed and view.any_idle() and view.first() is None:
            for request, slot in placed[-CANDIDATES:]:
                yield from self._prewarmed(view, request, slot)

    def _overdue(self, view: View, head: Pending) -> Place | None:
        if view.overtaken(head) < self.patience * view.slot_count():
            return None
        slot = view.idle_holder(head) or next(iter(view.few_idle(head, 1)), None)
        return Place((head,), slot, "overtaken too often") if slot is not None else None

    def _round(self, view: View) -> Sequence[Decision]:
        """The first queue that finds room; else when to look again, and a round without room."""
        wake_s: float | None = None
        seen: set[str] = set()
        no_room = False
        for oldest in view.oldest(CANDIDATES):
            nodes = _rooms_for(view, oldest, CANDIDATES)
            if not nodes:
                continue
            slot = nodes[0].idle[0]
            for queue in _queues_of(view, oldest, slot, self.most_batch):
                seen.update(member.id for member in queue.members)
                plan = self._plan(view, queue, nodes)
                if plan.wake_s is not None:
                    wake_s = plan.wake_s if wake_s is None else min(wake_s, plan.wake_s)
                    continue
                place = self._dispatched(queue, plan, nodes)
                if place is not None:
                    return [place]
                no_room = True
        further = self._further(view, seen)
        if further is not None:
            return [further]
        decisions: list[Decision] = [Skip(None, _ROUNDS)] if no_room else []
        if wake_s is not None:
            decisions.append(Wake(wake_s))
        return decisions

    def _further(self, view: View, seen: set[str]) -> Place | None:
        """A request with room for which more than 8 others, which have none, stand."""
        for slot in view.idle_slots():
            head = view.head(slot)
            if head is not None and head.id not in seen:
                return Place((head,), slot, "those before it have no room")
        return None

    def _plan(self, view: View, queue: _StageQueue, nodes: Sequence[GpuRoom]) -> _Plan:
        first, waiting = queue.members[0], len(queue.members)
        if view.visits_reached(first, _ROUNDS):
            return _Plan((Configuration(1, 1, 1),), None, "the least, after rounds without room")
        most = self.most_batch if self.fill_share else waiting
        profile = profile_of(view, first, nodes, most, PRICES)
        now = profile.up_to(waiting)
        choices = undominated(now.choices, _KEPT)
        in_time = [choice for choice in choices if choice.time_s < queue.slack_s]
        if not in_time:
            late = min(now.choices, key=_cost) if self.late else now.choices[0]
            return _Plan((late.configuration,), None, "too late")
        cheapest = sorted(in_time, key=_cost)[:_KEPT]  # equally cheap ones by time
        best = cheapest[0]
        until_s = self._fills_until(view, queue, best)
        if until_s > view.now and waiting < self.most_batch:
            larger = [choice for choice in profile.choices if choice.configuration.batch > waiting]
            if larger and min(choice.cost for choice in larger) <= best.cost * (1.0 + _DEARER):
                return _Plan((), until_s, "")
        chosen = [choice.configuration for choice in cheapest]
        waited = until_s > 0.0 and view.now > first.arrived_s
        return _Plan(chosen, None, "in time, after its batch could fill" if waited else "in time")

    def _fills_until(self, view: View, queue: _StageQueue, best: Choice) -> float:
        """Until when a batch may wait for more calls; 0 if it does not wait."""
        if not self.fill_share:
            return 0.0
        arrived_s = queue.members[0].arrived_s
        slo_s = queue.slack_s + view.now - arrived_s
        spare_s = max(0.0, slo_s - best.time_s)
        return arrived_s + self.fill_share * spare_s

    # -- where ----------------------------------------------------------------------------------

    def _dispatched(
        self, queue: _StageQueue, plan: _Plan, nodes: Sequence[GpuRoom]
    ) -> Place | None:
        request = queue.members[0]
        for given in plan.configurations:
            room = self._room(request, given, nodes)
            if room is not None:
                idle = room.idle
                warm = "warm" if idle[0].holds(request.models) else "cold"
                members = tuple(queue.members[: given.batch])
                return Place(members, idle[0], f"{warm}; {plan.rule}", given, idle[1 : given.vgpus])
        return None

    def _room(
        self, request: Pending, given: Configuration, nodes: Sequence[GpuRoom]
    ) -> GpuRoom | None:
        """The first GPU with room that has the models, else the one with most room.

        The paper says home invoker, warm invokers, cold ones. A home that has room but no idle
        instance of the function is read as a cold one: the stage would first wait for its start.
        """
        cold: GpuRoom | None = None
        for room in nodes:
            if not fits(room, given):
                continue
            if room.idle[0].holds(request.models):
                return room
            if cold is None or _free(room) > _free(cold):
                cold = room
        return cold

    def _prewarmed(self, view: View, request: Pending, slot: Slot) -> Iterator[Decision]:
        """Load what is expected before it is free again, where it needs nobody's memory."""
        if len(request.models) > 1 or view.idle_holder(request) is not None:
            return
        rate = view.facts(request.models[0]).rate
        if not rate or 1.0 / rate >= view.wait_s(slot):
            return
        for other in view.few_idle(request, CANDIDATES):
            if not other.holds(request.models) and not view.victims(request, other):
                yield Prefetch(request.models[0], other)
                return


def _rooms_for(view: View, request: Pending, most: int) -> list[GpuRoom]:
    """GPUs to choose from: those at home first, then those that hold the models, then others."""
    slots = [
        *view.home_idle(request)[:most],
        *view.idle_holders(request, most),
        *view.idle_keepers(request)[:most],
        *view.few_idle(request, most),
    ]
    rooms: dict[str, GpuRoom] = {}
    for slot in slots:
        room = view.room(slot)
        rooms.setdefault(room.gpu, room)
    return list(rooms.values())


def _queues_of(view: View, oldest: Pending, slot: Slot, most_batch: int) -> list[_StageQueue]:
    """The queues among the first requests of one set of models, at most a batch of each."""
    by_stage: dict[tuple[str, str, str], list[Pending]] = {}
    for request in view.waiting_like(oldest, 2 * most_batch):
        by_stage.setdefault(stage_of(request), []).append(request)
    return [
        _StageQueue(members[:most_batch], slack_s(view, members[0], slot))
        for members in by_stage.values()
    ]


def _free(room: GpuRoom) -> tuple[int, int]:
    """GPU parts first: they are what is scarce."""
    return len(room.idle), room.free_vcpus if room.vcpus else _VCPUS_FREE


def _cost(choice: Choice) -> float:
    return choice.cost
