"""Waiting requests, one lane per set of models, in order of arrival over all lanes."""

from collections.abc import Iterator
from heapq import heappop, heappush

from scheduler.core.state.pending import Bundle, Pending

_COMPACT_BEYOND = 64


class BundleLane:
    """The requests that wait for the same models, in order."""

    __slots__ = ("bundle", "first", "heads", "last", "waiting")

    def __init__(self, bundle: Bundle, heads: "list[tuple[int, BundleLane]]") -> None:
        self.bundle = bundle
        self.heads = heads
        self.first: Pending | None = None
        self.last: Pending | None = None
        self.waiting = 0

    def __lt__(self, other: "BundleLane") -> bool:
        """Two entries of one rank: at least one is outdated, so that any order will do."""
        return False

    def __hash__(self) -> int:
        """The same as without an order, which compiled classes otherwise have instead of it."""
        return id(self)

    def __iter__(self) -> Iterator[Pending]:
        pending = self.first
        while pending is not None:
            yield pending
            pending = pending.following


class RequestQueue:
    """A queue that finds its first request, and the first one of a lane, without a scan.

    Lanes are kept apart by size class (the smallest GPU size with room for the models), so that
    a GPU finds the first request it has room for. The heaps of lane heads are pruned when read.
    """

    __slots__ = ("_heads", "count", "lanes")

    def __init__(self, size_classes: int = 1) -> None:
        self.lanes: dict[Bundle, BundleLane] = {}
        self.count = 0
        self._heads: list[list[tuple[int, BundleLane]]] = [[] for _ in range(size_classes)]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Pending]:
        """All requests in order; costs a sort, so no placement uses it."""
        return iter(sorted(self.unsorted(), key=_rank))

    def unsorted(self) -> Iterator[Pending]:
        """All requests, lane by lane."""
        for lane in self.lanes.values():
            yield from lane

    def ahead_of(self, pending: Pending) -> int:
        """How many requests come before this one; costs as much as there are."""
        count = 0
        for lane in self.lanes.values():
            other = lane.first
            while other is not None and other.rank < pending.rank:
                count += 1
                other = other.following
        return count

    def first(self, size_class: int = 0) -> Pending | None:
        """The first request whose models are of this size class or a smaller one."""
        heads = self._heads
        if size_class == 0 or len(heads) == 1:
            return self._first_of(heads[0])
        best: Pending | None = None
        for lane_heads in heads[: size_class + 1]:
            head = self._first_of(lane_heads)
            if head is not None and (best is None or head.rank < best.rank):
                best = head
        return best

    def first_lanes(self, size_class: int) -> list[Pending]:
        """The first request of every lane of this size class or a smaller one, in order."""
        last = min(size_class, len(self._heads) - 1)
        heads = (
            lane.first
            for lane in self.lanes.values()
            if lane.first is not None and lane.bundle.size_class <= last
        )
        return sorted(heads, key=_rank)

    def oldest(self, most: int) -> list[Pending]:
        """The first requests of at most so many lanes, the oldest of all lanes, in order."""
        found: list[Pending] = []
        for heads in self._heads:
            aside: list[tuple[int, BundleLane]] = []
            while len(aside) < most and (first := self._first_of(heads)) is not None:
                aside.append(heappop(heads))
                while heads and heads[0] == aside[-1]:  # entered twice
                    heappop(heads)
                found.append(first)
            for entry in aside:
                heappush(heads, entry)
        found.sort(key=_rank)
        return found[:most]

    def add(self, pending: Pending, rank: int) -> None:
        """Insert a request by rank; free at the end of its lane, a walk elsewhere."""
        bundle = pending.bundle
        lane = self.lanes.get(bundle)
        if lane is None:
            heads = self._heads[bundle.size_class if len(self._heads) > 1 else 0]
            lane = self.lanes[bundle] = BundleLane(bundle, heads)
        pending.rank = rank
        lane.waiting += 1
        self.count += 1
        last = lane.last
        if last is None:
            lane.first = lane.last = pending
            self._enter(lane)
        elif last.rank < rank:
            last.following = pending
            pending.leading = last
            lane.last = pending
        else:
            _insert(lane, pending)

    def remove(self, pending: Pending) -> None:
        """Take a request out, wherever in its lane it is."""
        lane = self.lanes[pending.bundle]
        before, after = pending.leading, pending.following
        if after is None:
            lane.last = before
        else:
            after.leading = before
        if before is not None:
            before.following = after
        else:
            lane.first = after
            if after is not None:
                self._enter(lane)
            else:
                del self.lanes[lane.bundle]
        pending.leading = pending.following = None
        lane.waiting -= 1
        self.count -= 1

    def regroup(self, size_classes: int) -> None:
        """Sort the lanes into size classes again."""
        for heads in self._heads:
            heads.clear()  # lanes that are over refer to them, and would be left to the collector
        self._heads = [[] for _ in range(size_classes)]
        for lane in self.lanes.values():
            lane.heads = self._heads[lane.bundle.size_class if size_classes > 1 else 0]
            assert lane.first is not None
            heappush(lane.heads, (lane.first.rank, lane))

    def _enter(self, lane: BundleLane) -> None:
        assert lane.first is not None
        heappush(lane.heads, (lane.first.rank, lane))
        if len(lane.heads) > 2 * len(self.lanes) + _COMPACT_BEYOND:
            self.regroup(len(self._heads))

    @staticmethod
    def _first_of(heads: list[tuple[int, BundleLane]]) -> Pending | None:
        while heads:
            rank, lane = heads[0]
            first = lane.first
            if first is not None and first.rank == rank and lane.heads is heads:
                return first
            heappop(heads)
        return None


def _insert(lane: BundleLane, pending: Pending) -> None:
    """Insert into the lane by rank; only requests that come back from a slot need this."""
    after = lane.first
    assert after is not None
    while after.rank < pending.rank:
        assert after.following is not None
        after = after.following
    before = after.leading
    pending.leading, pending.following = before, after
    after.leading = pending
    if before is None:
        lane.first = pending
        heappush(lane.heads, (pending.rank, lane))
    else:
        before.following = pending


def _rank(pending: Pending) -> int:
    return pending.rank
