"""Slots ordered by how often they were used or when they are free, without re-sorting.

All of these are heaps that may hold outdated entries. A key only ever grows (how often a slot was
given work; when it will be free), so that an outdated entry lies too near to the top, comes up
there too early, and is then corrected or dropped.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeVar

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Bundle, BundleLane, Pending, RequestQueue
from scheduler.cluster.slots import Slot
from scheduler.model.values import SlotId

_COMPACT_BEYOND = 16


class HolderRanking:
    """The idle (or the busy) slots that hold one set of models, the best one first.

    A slot to which some of the models are on their way counts as busy for them.
    """

    def __init__(self, models: tuple[ModelId, ...], *, idle: bool) -> None:
        self._models = models
        self._idle = idle
        self._entries: list[tuple[float, SlotId, Slot]] = []

    def best(self) -> Slot | None:
        """Least used among the idle, soonest free among the busy; ties to the lowest id."""
        entries = self._entries
        while entries:
            key, slot_id, slot = entries[0]
            if not slot.gpu.active or not slot.holds(self._models):
                heappop(entries)
            elif slot.serves(self._models) != self._idle or slot.gpu.is_stuck(self._models):
                heappop(entries)
                slot.unlisted.append(self)
            else:
                present = self._key(slot)
                if present == key:
                    return slot
                heapreplace(entries, (present, slot_id, slot))
        return None

    def list(self, slot: Slot) -> None:
        """Enter a slot that has begun to hold the models, or whose key has shrunk."""
        heappush(self._entries, self._entry(slot))

    def overgrown(self, holders: int) -> bool:
        """Whether duplicate and outdated entries outnumber the holders."""
        return _overgrown(len(self._entries), holders)

    def rebuild(self, holders: Iterable[Slot]) -> None:
        self._entries = [self._entry(slot) for slot in holders]
        heapify(self._entries)

    def _entry(self, slot: Slot) -> tuple[float, SlotId, Slot]:
        key = self._key(slot)
        if not self._idle and key > slot.highest_listed_s:
            slot.highest_listed_s = key
        return key, slot.id, slot

    def _key(self, slot: Slot) -> float:
        return slot.frequency if self._idle else slot.serves_at_s(self._models)


class SlotRanking:
    """Slots by how many requests each was given; ties to the lowest id.

    Of loads, a slot is idle here if a load could begin beside its runs, whether it computes or not.
    """

    def __init__(self, *, of_loads: bool = False) -> None:
        self._entries: list[tuple[int, SlotId, Slot]] = []
        self._of_loads = of_loads

    def __len__(self) -> int:
        return len(self._entries)

    def overgrown(self, slots: int) -> bool:
        return _overgrown(len(self._entries), slots)

    def add(self, slot: Slot) -> None:
        heappush(self._entries, (slot.frequency, slot.id, slot))

    def first_idle(self) -> Slot | None:
        """The least used idle slot; a slot is entered again whenever it is idle after a change."""
        entries = self._entries
        while entries:
            frequency, slot_id, slot = entries[0]
            idle = slot.loadable if self._of_loads else slot.idle
            if idle and slot.frequency == frequency:
                return slot
            if idle and self._of_loads:  # it was given requests, and takes loads all the same
                heapreplace(entries, (slot.frequency, slot_id, slot))
            else:
                heappop(entries)
        return None

    def few_with_room(self, bundle: Bundle, most: int) -> list[Slot]:
        """At most so many idle slots whose GPUs have room for the models, the least used first."""
        accepted: list[Slot] = []
        aside: dict[Slot, tuple[int, SlotId, Slot]] = {}
        while len(accepted) < most and (slot := self.first_idle()) is not None:
            entry = heappop(self._entries)
            if slot not in aside and slot.gpu.has_room(bundle):
                accepted.append(slot)
            aside[slot] = entry
        for entry in aside.values():
            heappush(self._entries, entry)
        return accepted

    def first_that_could_hold(self, bundle: Bundle) -> Slot | None:
        """The least used slot, idle or not, whose GPU could hold the models."""
        entries, aside = self._entries, []
        first: Slot | None = None
        while entries and first is None:
            frequency, slot_id, slot = entries[0]
            if not slot.gpu.active:
                heappop(entries)
            elif slot.frequency != frequency:
                heapreplace(entries, (slot.frequency, slot_id, slot))
            elif slot.gpu.could_hold(bundle):
                first = slot
            else:
                aside.append(heappop(entries))
        for entry in aside:
            heappush(entries, entry)
        return first

    def pop(self) -> None:
        heappop(self._entries)


def first_beyond(
    ranking: SlotRanking, passed: set[Slot], aside: list[tuple[SlotRanking, Slot]]
) -> Slot | None:
    """The first idle slot that was not passed; the others go aside, with their ranking."""
    slot = ranking.first_idle()
    if not passed:
        return slot
    while slot is not None and slot in passed:
        ranking.pop()
        aside.append((ranking, slot))
        slot = ranking.first_idle()
    return slot


def first_with_local_work(
    ready: SlotRanking, passed: set[Slot], aside: list[tuple[SlotRanking, Slot]]
) -> Slot | None:
    slot = first_beyond(ready, passed, aside)
    while slot is not None and not slot.local.count:
        ready.pop()
        slot = first_beyond(ready, passed, aside)
    return slot


def _overgrown(entries: int, live: int) -> bool:
    return entries > 2 * live + _COMPACT_BEYOND


class LoadableSlots:
    """The loadable slots of each size class, the least used first.

    Made when a policy asks for it, so that policies that do not ask pay nothing, and anew when
    sizes have changed.
    """

    def __init__(self, slots: Iterable[Slot], size_classes: int) -> None:
        """Follow these slots, which are all there are."""
        self.rankings = [SlotRanking(of_loads=True) for _ in range(size_classes)]
        for slot in slots:
            if slot.loadable:
                self.rankings[slot.gpu.size_class].add(slot)

    def settle(self, slot: Slot, slots: int) -> bool:
        """Follow a change of one of so many slots; False if a new start is due, to drop entries."""
        if not slot.loadable:
            return True
        ranking = self.rankings[slot.gpu.size_class]
        ranking.add(slot)
        return not ranking.overgrown(slots)

    def has_any(self) -> bool:
        return any(ranking.first_idle() is not None for ranking in self.rankings)


# Which waiting requests could be served at once, on which slots, and which models lack GPUs.
#
# Made when a policy asks for it, so that policies that do not ask pay nothing. Like the rankings,
# the heaps here may hold outdated entries; these come up too early, and are corrected then.

_COMPACT_LANES_BEYOND = 64

Key = TypeVar("Key", int, float)


class UnmetDemand:
    """Follows the global queue, residency and idle slots; all that waits already is fresh."""

    def __init__(
        self,
        waiting: RequestQueue,
        is_held: Callable[[Bundle], bool],
        excess_s: Callable[[BundleLane], float],
        idle_slots: Iterable[Slot],
    ) -> None:
        self.fresh_slots = dict.fromkeys(idle_slots)
        self.fresh_bundles = dict.fromkeys(waiting.lanes)
        self._waiting = waiting
        self._is_held = is_held
        self._excess_s = excess_s
        self._unheld: list[tuple[int, BundleLane]] = []
        self._excesses: list[tuple[float, BundleLane]] = []
        self._rebuild()

    # -- what has changed -----------------------------------------------------------------------

    def waits(self, bundle: Bundle) -> None:
        self.fresh_bundles[bundle] = None
        self.residency_changed(bundle)

    def residency_changed(self, bundle: Bundle) -> None:
        """A GPU has begun to hold these models, or one no longer does."""
        lane = self._waiting.lanes.get(bundle)
        if lane is None or lane.first is None:
            return
        if self._is_held(bundle):
            heappush(self._excesses, (-self._excess_s(lane), lane))
            self.fresh_bundles[bundle] = None  # other slots of that GPU may be idle
        else:
            heappush(self._unheld, (lane.first.rank, lane))
        entries = len(self._excesses) + len(self._unheld)
        if entries > 4 * len(self._waiting.lanes) + _COMPACT_LANES_BEYOND:
            self._rebuild()

    # -- questions ------------------------------------------------------------------------------

    def unheld(self, most: int, could_go: Callable[[Pending], bool]) -> Sequence[Pending]:
        """First requests of lanes whose models no GPU holds but one could, the oldest first."""
        return _first(self._unheld, most, self._rank_if_unheld, could_go)

    def most_in_excess(self, most: int) -> Sequence[Pending]:
        """First requests of lanes whose waiting work per holder exceeds one more load."""
        return _first(self._excesses, most, self._excess_if_held, None)

    # -- parts ----------------------------------------------------------------------------------

    def _rank_if_unheld(self, lane: BundleLane) -> int | None:
        return None if self._is_held(lane.bundle) else _first_rank(lane)

    def _excess_if_held(self, lane: BundleLane) -> float | None:
        return -self._excess_s(lane) if self._is_held(lane.bundle) else None

    def _rebuild(self) -> None:
        self._unheld, self._excesses = [], []
        for lane in self._waiting.lanes.values():
            if self._is_held(lane.bundle):
                self._excesses.append((-self._excess_s(lane), lane))
            else:
                self._unheld.append((_first_rank(lane), lane))
        heapify(self._unheld)
        heapify(self._excesses)


def _first_rank(lane: BundleLane) -> int:
    assert lane.first is not None
    return lane.first.rank


def _first(
    heap: list[tuple[Key, BundleLane]],
    most: int,
    present_key: Callable[[BundleLane], Key | None],
    wanted: Callable[[Pending], bool] | None,
) -> list[Pending]:
    """The first wanted lanes of a heap by their present keys; drops what is outdated or double."""
    looked_at: dict[BundleLane, Key] = {}
    requests: list[Pending] = []
    while heap and len(requests) < most:
        entry, lane = heappop(heap)
        present = present_key(lane) if lane.first is not None and lane not in looked_at else None
        if present is None:
            continue
        if present > entry:
            heappush(heap, (present, lane))
            continue
        looked_at[lane] = present
        if lane.first is not None and (wanted is None or wanted(lane.first)):
            requests.append(lane.first)
    for lane, present in looked_at.items():
        heappush(heap, (present, lane))
    return requests
