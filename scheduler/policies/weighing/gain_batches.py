"""Which waiting requests share a lease, and in which configuration: what costs least for each."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from cache_manager.model.ids import GpuId
from scheduler.model.values import Configuration
from scheduler.policies.placement_policy import GpuRoom, Place, RequestView, SlotView, View
from scheduler.policies.weighing.batching import (
    NOTHING_AHEAD,
    PRICES,
    fits,
    members_of,
    profile_of,
    scarce_prices,
    slack_s,
)
from scheduler.policies.weighing.gain_terms import AWAY_S, CANDIDATES
from scheduler.workflows.cost_to_go import (
    MISS_WORTH,
    BatchOption,
    WaitingCall,
    batch_choices,
    decide,
    worth_of,
)
from scheduler.workflows.stage_profiles import StageProfile

_ALONE = Configuration(1, 1, 1)
# By what part of its time a batch must be sooner than that: runs vary.
_MARGIN = 0.05


class _Weighed(NamedTuple):
    """What a batch is chosen from: members, GPUs, all costs, and the options, the best first."""

    members: list[RequestView]
    near: Sequence[GpuId]
    rooms: list[GpuRoom]
    profile: StageProfile
    calls: list[WaitingCall]
    options: Sequence[BatchOption]


def batched(view: View, hit: Place, most_batch: int) -> Place:
    """The same placement, or one for more requests, slots and vCPUs, if that costs each less.

    Slots and vCPUs may be those of another GPU that has the models.
    """
    weighed = _weigh(view, hit, most_batch)
    return hit if weighed is None else _chosen(hit, weighed)


def batch_terms(view: View, hit: Place, most_batch: int) -> tuple[SlotView, dict[str, float]]:
    """The slot of the batch, and what it saves each request, in seconds of a slot.

    By what it costs, and by what it is worth to be in time.
    """
    weighed = _weigh(view, hit, most_batch)
    if weighed is None:
        return hit.slot, {}
    place = _chosen(hit, weighed)
    given = place.configuration or _ALONE
    known = {choice.configuration: choice for choice in weighed.profile.choices}
    chosen, alone = known.get(given), known.get(_ALONE)
    if chosen is None or alone is None or chosen is alone:
        return place.slot, {}
    slot_s = PRICES.cost(_ALONE, 1.0) or 1.0
    saved = [
        worth_of(alone, weighed.calls[:1], miss, alone.cost)
        - worth_of(chosen, weighed.calls[: given.batch], miss, alone.cost)
        for miss in (0.0, MISS_WORTH)
    ]
    batch_s, all_s = (each / slot_s for each in saved)
    return place.slot, {"batch": batch_s, "deadlines": all_s - batch_s}


def _chosen(hit: Place, weighed: _Weighed) -> Place:
    """The best option for which a GPU has room."""
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
    calls = [_waiting(view, each, slot, away_s) for each in members]
    options = decide(batch_choices(profile), calls, None).options
    return _Weighed(members, near, rooms, profile, calls, options)


def _placed(hit: Place, weighed: _Weighed, room: GpuRoom, given: Configuration) -> Place:
    idle = list(room.idle)
    if room is weighed.rooms[0]:
        idle = [hit.slot, *(each for each in idle if each is not hit.slot)]
    if given == _ALONE:
        return Place(hit.requests, idle[0], hit.rule)
    batch = tuple(weighed.members[: given.batch])
    return Place(batch, idle[0], f"{hit.rule}, as a batch", given, idle[1 : given.vgpus])


def _rooms(view: View, hit: Place) -> tuple[Sequence[GpuId], list[GpuRoom]]:
    """The GPUs that are near the request's data, and all that could take it, its own first."""
    first, slot = hit.requests[0], hit.slot
    near = [each for each in view.near_idle(first) if view.is_hit(first, each)]
    rooms: dict[GpuId, GpuRoom] = {}
    names: dict[GpuId, None] = {}
    for each in (slot, *near, *view.idle_holders(first, CANDIDATES)):
        room = view.room(each)
        rooms.setdefault(room.gpu, room)
    for each in near:
        names[view.room(each).gpu] = None
    return list(names), list(rooms.values())


def _waiting(view: View, request: RequestView, slot: SlotView, away_s: float) -> WaitingCall:
    """A request that is late already joins no batch for being late."""
    left_s = slack_s(view, request, slot) / (1.0 + _MARGIN)
    return WaitingCall(left_s if left_s > 0.0 else inf, NOTHING_AHEAD, 0.0, away_s)
