"""GAIN: one sum of seconds weighs hits, loads, further copies, data, neighbours and batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, NamedTuple

from cache_manager.model.ids import GpuId, ModelId
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import GpuRoom, View
from scheduler.model.values import Configuration
from scheduler.policies.placement_policy import Decision, Place, WeighedSlot, check_bounds
from scheduler.policies.weighing import (
    AWAY_S,
    CANDIDATES,
    IDLE_DISCOUNT,
    MISS_WORTH,
    PRICES,
    BatchOption,
    Gain,
    StageProfile,
    batch_cost,
    batch_options,
    fits,
    members_of,
    neighbours_s,
    profile_of,
    reloads,
    scarce_prices,
    slack_s,
    wait_at_s,
)

_OVERDUE = "overtaken too often"
_LEAST_S = 1e-9  # a time that was measured as nothing
# Over how many loads' time a copy is expected to pay, and the weight of the loads that the victims'
# requests wait for: chosen by the sweeps of docs/evaluation/gain.md.
_HORIZON = 12.0
_VICTIMS = 2.0
_NOTHING_SAVED = 0.0, 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Ours, for all grounds: docs/evaluation/gain.md has its rules and what it was measured on.

    Hits go first. A load gains the seconds that its copy saves the requests that wait now and,
    where loads `overlap` runs, those of the time of 12 loads; less the time until the copy can run,
    twice what its victims' requests would wait, 20 ms away from the data, and what neighbours lose.
    A batch has the slots and vCPUs that cost least for each request, missed deadlines included.
    Namespaces take turns by their weights, `lead_s` ahead at most.
    """

    patience: Annotated[int, "how many later requests for each slot may overtake the first"] = 25
    overlap: Annotated[
        int, "1: loads go beside runs; 0: on this hardware they take the slot's compute"
    ] = 1
    lead_s: Annotated[
        float, "how much later than the first turn a namespace's request may go; 0: no turns"
    ] = 48.0
    most_batch: Annotated[int, "how many requests run together at most; 0: one by one"] = 16

    def __post_init__(self) -> None:
        check_bounds("gain", self)

    def decide(self, view: View) -> Iterator[Decision]:
        while (head := view.first()) is not None:
            may_load = view.any_loadable() if self.overlap else view.any_idle()
            if not may_load and not view.any_idle():
                return
            decision = self._overdue(view, head) or self._hit(view)
            if decision is None and may_load:
                decision = self._load_unheld(view) or self._load_again(view)
            if decision is None:
                return
            yield decision

    def weighed(self, view: View, request: Pending) -> Sequence[WeighedSlot]:
        """The slots that it weighs for this request: hits, loads, and the wait, which gains 0."""
        terms_of: dict[Slot, dict[str, float]] = {}
        load_s = view.nearest_load_s(request)
        for slot in (*view.near_holders(request), *view.idle_holders(request, CANDIDATES)):
            terms_of[slot] = {"load": load_s, **self._hit_gain(view, request, slot).named()}
        idle = view.idle_holder(request)
        if idle is not None:
            place = Place((request,), self._holder(view, request, idle), "")
            slot, terms = batch_terms(view, place, self.most_batch)
            terms_of[slot] = {**terms_of.get(slot, {"load": load_s}), **terms}
        holder = view.busy_holder(request)
        if holder is not None:
            terms_of.setdefault(holder, {})
        saved_s = self._saved_s(view, request)
        for slot in self._places(view, request):
            if not slot.holds(request.models):
                victims = view.victims(request, slot)
                gain = self._load_gain(view, request, slot, victims, saved_s)
                terms_of.setdefault(slot, gain.named())
        return [WeighedSlot(slot.id, terms) for slot, terms in terms_of.items()]

    # -- the four rules, in order ---------------------------------------------------------------

    def _overdue(self, view: View, head: Pending) -> Place | None:
        if view.overtaken(head) < self.patience * view.slot_count():
            return None
        slot = view.idle_holder(head)
        if slot is not None:
            return Place((head,), slot, _OVERDUE)
        if view.busy_holder(head) is not None:
            return None
        slot = self._best(view, head, spare=False)
        return self._load(head, slot, _OVERDUE) if slot is not None else None

    def _hit(self, view: View) -> Place | None:
        for hit, slot in view.hits():
            best = self._holder(view, hit, slot)
            request = self._quietest(view, hit, best)
            return batched(view, Place((request,), best, "hit on an idle GPU"), self.most_batch)
        return None

    def _holder(self, view: View, hit: Pending, slot: Slot) -> Slot:
        """Of the idle holders the one that gains most; mostly all gain the same: then this one."""
        near = view.near_holders(hit)
        if not near and neighbours_s(view, hit, slot) <= 0.0:
            return slot
        holders = (slot, *near, *view.idle_holders(hit, CANDIDATES))
        return max(holders, key=lambda holder: self._hit_gain(view, hit, holder).total)

    def _quietest(self, view: View, hit: Pending, slot: Slot) -> Pending:
        """Of the oldest requests with a hit there, the one that goes best with the runs there.

        That is the one for which they lose least together, for each second of its run.
        """
        if self._lost_part(view, hit, slot) <= 0.0:
            return hit
        others = [other for other in view.oldest(CANDIDATES) if slot.holds(other.models)]
        return min((hit, *others), key=lambda request: self._lost_part(view, request, slot))

    def _lost_part(self, view: View, request: Pending, slot: Slot) -> float:
        return neighbours_s(view, request, slot) / max(view.run_s(request, slot), _LEAST_S)

    def _load_unheld(self, view: View) -> Place | None:
        for request in view.unheld(CANDIDATES):
            slot = self._best(view, request, spare=True)
            if slot is not None:
                return self._load(request, slot, "on no GPU")
        return None

    def _load_again(self, view: View) -> Place | None:
        best_s = 0.0
        best: tuple[Pending, Slot] | None = None
        cheaper = self._cheaper(view)
        for request in view.most_in_excess(CANDIDATES):
            saved_s = self._saved_s(view, request)
            if sum(saved_s) - cheaper * view.nearest_load_s(request) <= best_s:
                continue
            for slot in self._places(view, request):
                if slot.holds(request.models):
                    continue
                victims = view.victims(request, slot)
                gain_s = self._load_gain(view, request, slot, victims, saved_s).total
                if gain_s > best_s and not view.strands(slot, victims):
                    best_s, best = gain_s, (request, slot)
        if best is None:
            return None
        youngest = view.last_like(best[0])
        return self._load(youngest, best[1], "one more copy saves more than it costs")

    # -- where ----------------------------------------------------------------------------------

    def _best(self, view: View, request: Pending, *, spare: bool) -> Slot | None:
        """Where models that nobody holds are loaded best."""
        gains_s: dict[Slot, float] = {}
        for slot in self._places(view, request):
            victims = view.victims(request, slot)
            if not (spare and view.strands(slot, victims)):
                gain = self._load_gain(view, request, slot, victims, _NOTHING_SAVED)
                gains_s[slot] = gain.total
        return max(gains_s, key=gains_s.__getitem__, default=None)

    def _places(self, view: View, request: Pending) -> Sequence[Slot]:
        near, keepers = view.near_idle(request), view.idle_keepers(request)
        if not self.overlap:
            few = view.few_idle(request, CANDIDATES)
            return list(dict.fromkeys((*near, *keepers, *few))) if near or keepers else few
        few = view.few_loadable(request, CANDIDATES)
        if not near and not keepers:
            return few
        preferred = [slot for slot in (*near, *keepers) if slot.loadable]
        return list(dict.fromkeys((*preferred, *few)))

    def _load(self, request: Pending, slot: Slot, rule: str) -> Place:
        return Place((request,), slot, rule, beside=self.overlap > 0)

    # -- terms ----------------------------------------------------------------------------------

    def _hit_gain(self, view: View, request: Pending, slot: Slot) -> Gain:
        """Against a hit on any other slot: what the load would take all of them save."""
        away_s = self._away_s(view, request, slot)
        return Gain(data=-away_s, neighbours=-neighbours_s(view, request, slot))

    def _load_gain(
        self,
        view: View,
        request: Pending,
        slot: Slot,
        victims: Sequence[ModelId],
        saved_s: tuple[float, float],
    ) -> Gain:
        load_s = view.load_s(request, slot)
        if self.overlap:
            load_s = max(load_s, view.wait_s(slot))
        else:
            load_s *= self._cheaper(view)
        lost_s = 0.0
        if victims:
            horizon_s = _VICTIMS * _HORIZON * view.nearest_load_s(request)
            lost_s = horizon_s * reloads(view, victims)
        away_s = self._away_s(view, request, slot)
        disturbance_s = neighbours_s(view, request, slot)
        return Gain(*saved_s, -load_s, -lost_s, -away_s, -disturbance_s)

    def _saved_s(self, view: View, request: Pending) -> tuple[float, float]:
        """What the last of the waiting requests, and those to come, wait without a new copy."""
        holder = view.busy_holder(request)
        if holder is None:
            return 0.0, 0.0
        begins_s = view.begins_s(request, holder)
        wait_s = wait_at_s(view, request, holder, begins_s)
        if not self.overlap:
            return wait_s, 0.0
        horizon_s = _HORIZON * view.nearest_load_s(request)
        expected = horizon_s * min([view.facts(model).rate for model in request.models])
        return wait_s, expected * wait_s / (view.copies(request) + 1)

    def _cheaper(self, view: View) -> float:
        """The weight of a load: compute that nobody needs now is cheaper to take."""
        return 1.0 if self.overlap else 1.0 - IDLE_DISCOUNT * view.idle_share()

    def _away_s(self, view: View, request: Pending, slot: Slot) -> float:
        near = view.near_idle(request)
        return AWAY_S if near and slot not in near else 0.0


_ALONE = Configuration(1, 1, 1)
# By what part of its time a batch must be sooner than that: runs vary.
_MARGIN = 0.05


class _Weighed(NamedTuple):
    """What a batch is chosen from: members, GPUs, all costs, and the options, the best first."""

    members: list[Pending]
    near: Sequence[GpuId]
    rooms: list[GpuRoom]
    profile: StageProfile
    lefts_s: list[float]
    options: Sequence[BatchOption]


def batched(view: View, hit: Place, most_batch: int) -> Place:
    """The same placement, or one for more requests, slots and vCPUs, if that costs each less.

    Slots and vCPUs may be those of another GPU that has the models.
    """
    weighed = _weigh(view, hit, most_batch)
    return hit if weighed is None else _chosen(hit, weighed)


def batch_terms(view: View, hit: Place, most_batch: int) -> tuple[Slot, dict[str, float]]:
    """The slot of the batch, and what it saves each request, in seconds of a slot.

    By what it costs, and by what it is worth to be in time.
    """
    weighed = _weigh(view, hit, most_batch)
    if weighed is None:
        return hit.slot, {}
    place = _chosen(hit, weighed)
    given = place.configuration or _ALONE
    by_configuration = {choice.configuration: choice for choice in weighed.profile.choices}
    chosen, alone = by_configuration.get(given), by_configuration.get(_ALONE)
    if chosen is None or alone is None or chosen is alone:
        return place.slot, {}
    slot_s = PRICES.cost(_ALONE, 1.0) or 1.0
    saved = [
        batch_cost(alone, weighed.lefts_s[0], 0.0, alone.cost, miss)
        - batch_cost(chosen, min(weighed.lefts_s[: given.batch]), 0.0, alone.cost, miss)
        for miss in (0.0, MISS_WORTH)
    ]
    batch_s, all_s = (each / slot_s for each in saved)
    return place.slot, {"batch": batch_s, "deadlines": all_s - batch_s}


def _chosen(hit: Place, weighed: _Weighed) -> Place:
    for given, is_near in weighed.options:
        for room in weighed.rooms:
            if not fits(room, given) or (weighed.near and is_near != (room.gpu in weighed.near)):
                continue
            return _placed(hit, weighed, room, given)
    return hit


def _weigh(view: View, hit: Place, most_batch: int) -> _Weighed | None:
    """None if there is nothing to choose from."""
    first, slot = hit.requests[0], hit.slot
    room = view.room(slot)
    is_plain = room.slots == 1 and not room.vcpus
    if is_plain and (most_batch <= 1 or view.waiting(first) <= 1):
        return None
    members = members_of(view, first, most_batch)
    if is_plain and len(members) == 1:
        return None
    near: Sequence[GpuId] = ()
    rooms = [room]
    if not is_plain:
        near, rooms = _rooms(view, hit)
    profile = profile_of(view, first, rooms, len(members), scarce_prices(view, rooms))
    away_s = AWAY_S if near else 0.0
    lefts_s = [_left_s(view, member, slot) for member in members]
    options = batch_options(profile, lefts_s, away_s)
    return _Weighed(members, near, rooms, profile, lefts_s, options)


def _placed(hit: Place, weighed: _Weighed, room: GpuRoom, given: Configuration) -> Place:
    idle = list(room.idle)
    if room is weighed.rooms[0]:
        idle = [hit.slot, *(slot for slot in idle if slot is not hit.slot)]
    if given == _ALONE:
        return Place(hit.requests, idle[0], hit.rule)
    batch = tuple(weighed.members[: given.batch])
    return Place(batch, idle[0], f"{hit.rule}, as a batch", given, idle[1 : given.vgpus])


def _rooms(view: View, hit: Place) -> tuple[Sequence[GpuId], list[GpuRoom]]:
    """The GPUs that are near the request's data, and all that could take it, its own first."""
    first, slot = hit.requests[0], hit.slot
    near = view.near_holders(first)
    rooms: dict[GpuId, GpuRoom] = {}
    names: dict[GpuId, None] = {}
    for holder in (slot, *near, *view.idle_holders(first, CANDIDATES)):
        room = view.room(holder)
        rooms.setdefault(room.gpu, room)
    for holder in near:
        names[view.room(holder).gpu] = None
    return list(names), list(rooms.values())


def _left_s(view: View, request: Pending, slot: Slot) -> float:
    """The time that a request has; one that is late already joins no batch for being late."""
    left_s = slack_s(view, request, slot) / (1.0 + _MARGIN)
    return left_s if left_s > 0.0 else inf
