"""Slots ordered by how often they were used or when they are free, without re-sorting.

All of these are heaps that may hold outdated entries. A key only ever grows (how often a slot was
given work; when it will be free), so that an outdated entry lies too near to the top, comes up
there too early, and is then corrected or dropped.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace

from cache_manager.model.ids import ModelId
from scheduler.core.slots import Slot
from scheduler.model.values import SlotId

_COMPACT_BEYOND = 16


class HolderRanking:
    """The idle (or the busy) slots that hold one set of models, the best one first.

    A slot to which some of the models are on their way counts as busy for them.
    """

    __slots__ = ("_entries", "_idle", "_models")

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

    __slots__ = ("_entries", "_of_loads")

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

    def few_idle(self, most: int, accepts: Callable[[Slot], bool]) -> list[Slot]:
        """The slots, the least used first."""
        accepted: list[Slot] = []
        aside: dict[Slot, tuple[int, SlotId, Slot]] = {}
        while len(accepted) < most and (slot := self.first_idle()) is not None:
            entry = heappop(self._entries)
            if slot not in aside and accepts(slot):
                accepted.append(slot)
            aside[slot] = entry
        for entry in aside.values():
            heappush(self._entries, entry)
        return accepted

    def first_active(self, accepts: Callable[[Slot], bool]) -> Slot | None:
        """The least used slot, idle or not, that `accepts` accepts."""
        entries, aside = self._entries, []
        first: Slot | None = None
        while entries and first is None:
            frequency, slot_id, slot = entries[0]
            if not slot.gpu.active:
                heappop(entries)
            elif slot.frequency != frequency:
                heapreplace(entries, (slot.frequency, slot_id, slot))
            elif accepts(slot):
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

    Kept only after a policy has asked for it, so that policies that do not ask pay nothing; until
    then nothing is `running`.
    """

    def __init__(self) -> None:
        self.running = False
        self.rankings: list[SlotRanking] = []

    def start(self, slots: Iterable[Slot], size_classes: int) -> None:
        """Begin to follow these slots, which are all there are; also after sizes have changed."""
        self.running = True
        self.rankings = [SlotRanking(of_loads=True) for _ in range(size_classes)]
        for slot in slots:
            if slot.loadable:
                self.rankings[slot.gpu.size_class].add(slot)

    def stop(self) -> None:
        self.running = False
        self.rankings = []

    def settle(self, slot: Slot, slots: int) -> bool:
        """Follow a change of one of so many slots; False if a new start is due, to drop entries."""
        if not self.running or not slot.loadable:
            return True
        ranking = self.rankings[slot.gpu.size_class]
        ranking.add(slot)
        return not ranking.overgrown(slots)

    def has_any(self) -> bool:
        return any(ranking.first_idle() is not None for ranking in self.rankings)
