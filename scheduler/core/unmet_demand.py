"""Which waiting requests could be served at once, on which slots, and which models lack GPUs.

Kept only after a policy has asked for it, so that policies that do not ask pay nothing. Like the
rankings, the heaps here may hold outdated entries; these come up too early, and are corrected then.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from scheduler.core.request_queue import Bundle, BundleLane, Pending, RequestQueue
from scheduler.core.slots import Slot

_COMPACT_BEYOND = 64

Key = TypeVar("Key", int, float)


class UnmetDemand:
    """Follows the global queue, residency and idle slots from the moment it is started."""

    def __init__(
        self,
        waiting: RequestQueue,
        is_held: Callable[[Bundle], bool],
        excess_s: Callable[[BundleLane], float],
    ) -> None:
        self.running = False
        self.fresh_slots: dict[Slot, None] = {}
        self.fresh_bundles: dict[Bundle, None] = {}
        self._waiting = waiting
        self._is_held = is_held
        self._excess_s = excess_s
        self._unheld: list[tuple[int, BundleLane]] = []
        self._excesses: list[tuple[float, BundleLane]] = []

    def start(self, idle_slots: Iterable[Slot]) -> None:
        """Begin to follow; everything that waits already counts as new."""
        self.running = True
        self.fresh_slots = dict.fromkeys(idle_slots)
        self.fresh_bundles = dict.fromkeys(self._waiting.lanes)
        self._rebuild()

    def stop(self) -> None:
        self.running = False
        self.fresh_slots.clear()
        self.fresh_bundles.clear()
        self._unheld.clear()
        self._excesses.clear()

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
        else:
            heappush(self._unheld, (lane.first.rank, lane))
        if len(self._excesses) + len(self._unheld) > self._most_entries():
            self._rebuild()

    # -- questions ------------------------------------------------------------------------------

    def unheld(self, most: int, could_go: Callable[[Pending], bool]) -> Sequence[Pending]:
        """First requests of lanes whose models no GPU holds but one could, the oldest first."""
        return _first(self._unheld, most, self._rank_if_unheld, could_go)

    def most_in_excess(self, most: int) -> Sequence[Pending]:
        """First requests of lanes whose waiting work per holder exceeds one more load."""
        return _first(self._excesses, most, self._excess_if_held, _always)

    # -- parts ----------------------------------------------------------------------------------

    def _held(self, lane: BundleLane) -> bool:
        return self._is_held(lane.bundle)

    def _rank_if_unheld(self, lane: BundleLane) -> int | None:
        return None if self._held(lane) else _first_rank(lane)

    def _excess_if_held(self, lane: BundleLane) -> float | None:
        return -self._excess_s(lane) if self._held(lane) else None

    def _most_entries(self) -> int:
        return 4 * len(self._waiting.lanes) + _COMPACT_BEYOND

    def _rebuild(self) -> None:
        lanes = self._waiting.lanes.values()
        self._unheld = [(_first_rank(lane), lane) for lane in lanes if not self._held(lane)]
        self._excesses = [(-self._excess_s(lane), lane) for lane in lanes if self._held(lane)]
        heapify(self._unheld)
        heapify(self._excesses)


def _first_rank(lane: BundleLane) -> int:
    assert lane.first is not None
    return lane.first.rank


def _always(_: Pending) -> bool:
    return True


def _first(
    heap: list[tuple[Key, BundleLane]],
    most: int,
    present_key: Callable[[BundleLane], Key | None],
    wanted: Callable[[Pending], bool],
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
        if lane.first is not None and wanted(lane.first):
            requests.append(lane.first)
    for lane, present in looked_at.items():
        heappush(heap, (present, lane))
    return requests
