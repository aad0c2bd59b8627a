"""Waiting requests, a lane for each set of models, in order of arrival, with their visits."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from heapq import heappop, heappush, heappushpop, nlargest

from cache_manager.model.ids import ModelId
from scheduler.model.values import LeaseId, Request, SlotId

_COMPACT_BEYOND = 64


class Standing(Enum):
    """Where an accepted request is; HELD: policies do not see it until it is its turn."""

    HELD = auto()
    WAITING = auto()
    LOCAL = auto()
    LEASED = auto()
    PAUSED = auto()


class Bundle:
    """The models that one request needs together; interned, so that it is compared by identity.

    `needs` holds each model's memory; `size_class` is the smallest of `sizes` that has room.
    """

    __slots__ = ("bytes", "models", "needs", "size_class")

    def __init__(
        self,
        models: tuple[ModelId, ...],
        needs: tuple[tuple[ModelId, int], ...] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        self.models = models
        self.measure(needs, sizes)

    def measure(self, needs: tuple[tuple[ModelId, int], ...], sizes: Sequence[int]) -> None:
        self.needs = needs
        self.bytes = sum([size_bytes for _, size_bytes in needs])
        self.size_class = bisect_left(sizes, self.bytes)


class Pending:
    """One request that the core has accepted and not finished yet.

    `seq` is its place in the order of arrival, `number` how many requests were accepted before it
    and not paused then, `rank` its place in its present queue; `wait_s` is what it adds to the
    wait of a local queue; `gave_back` are the leases that it gave back early before it asked for
    another one. It was held back for `held_s`, at last for `held_for`; it `pauses` while it waits
    for something else than a GPU.
    """

    __slots__ = (
        "arrived_s",
        "at",
        "bundle",
        "following",
        "gave_back",
        "held_for",
        "held_s",
        "id",
        "leading",
        "lease",
        "models",
        "number",
        "pauses",
        "rank",
        "request",
        "seq",
        "standing",
        "wait_s",
    )

    def __init__(self, request: Request, bundle: Bundle, seq: int, arrived_s: float) -> None:
        self.id = request.id
        self.request = request
        self.bundle = bundle
        self.models = bundle.models
        self.seq = seq
        self.arrived_s = arrived_s
        self.rank = seq
        self.number = 0
        self.leading: Pending | None = None
        self.following: Pending | None = None
        self.standing = Standing.WAITING
        self.at: SlotId | None = None
        self.lease: LeaseId | None = None
        self.gave_back: list[LeaseId] = []
        self.wait_s = 0.0
        self.held_s = 0.0
        self.held_for = ""
        self.pauses = False


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

    def __iter__(self) -> Iterator[Pending]:
        pending = self.first
        while pending is not None:
            yield pending
            pending = pending.following


class RequestQueue:
    """A queue that finds its first request, and the first one of a lane, without a scan.

    Lanes are kept apart by size class (the smallest GPU size with room for the models), so that
    a GPU finds the first request it has room for. The heaps of lane heads are pruned when read.
    The queue knows for how long, all in all, it has not been empty.
    """

    def __init__(self, size_classes: int = 1) -> None:
        self.lanes: dict[Bundle, BundleLane] = {}
        self.count = 0
        self._heads: list[list[tuple[int, BundleLane]]] = [[] for _ in range(size_classes)]
        self._contended_s = 0.0
        self._contended_since_s = 0.0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Pending]:
        """All requests in order; costs a sort, so no placement uses it."""
        return iter(sorted(self.unsorted(), key=_rank))

    def unsorted(self) -> Iterator[Pending]:
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
        requests: list[Pending] = []
        for heads in self._heads:
            aside: list[tuple[int, BundleLane]] = []
            while len(aside) < most and (first := self._first_of(heads)) is not None:
                aside.append(heappop(heads))
                while heads and heads[0] == aside[-1]:  # entered twice
                    heappop(heads)
                requests.append(first)
            for entry in aside:
                heappush(heads, entry)
        requests.sort(key=_rank)
        return requests[:most]

    def contended_s(self, now: float) -> float:
        """For how long, in all, somebody has waited here."""
        waits_s = max(0.0, now - self._contended_since_s) if self.count else 0.0
        return self._contended_s + waits_s

    def add(self, pending: Pending, rank: int, now: float) -> None:
        """Insert a request by rank; free at the end of its lane, a walk elsewhere."""
        if not self.count:
            self._contended_since_s = now
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

    def remove(self, pending: Pending, now: float) -> None:
        if self.count == 1:
            self._contended_s = self.contended_s(now)
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


# Older placements count less: half as much after this much time with requests waiting.
_MEMORY_S = 10.0


class QueuePace:
    """The seconds from one placement to the next, while requests wait.

    Times without a waiting request are left out: they would show what is asked of the GPUs, not
    what the GPUs can do. So are times without a GPU, which say nothing of the GPUs that come back.
    The result includes everything that holds a GPU: loads, runs, the time that functions take
    between their runs.
    """

    def __init__(self) -> None:
        self._placed = 0.0
        self._took_s = 0.0
        # The last placement that left others waiting.
        self._since_s: float | None = None

    def placed(self, count: int, now: float) -> None:
        """Requests were placed, and others still wait."""
        if self._since_s is not None:
            step_s = now - self._since_s
            # Not an exponential, whose last digit depends on the machine: recordings must replay.
            kept = _MEMORY_S / (_MEMORY_S + step_s)
            self._placed = self._placed * kept + count
            self._took_s = self._took_s * kept + step_s
        self._since_s = now

    def pause(self) -> None:
        """Leave out the time until the next placement: no request waits, or no GPU is offered."""
        self._since_s = None

    def wait_s(self, ahead: int) -> float:
        """The expected wait behind this many requests; 0 while nothing has been measured."""
        return ahead * self._took_s / self._placed if self._placed else 0.0


class Visits:
    """Counts up to a limit.

    A policy passes over everything before a boundary. Requests keep their order, so a request's
    visits are the boundaries behind it, and it has reached the limit L if the L-th largest boundary
    is behind it: only L numbers must be kept. A request that comes back to its old place counts as
    if it had been there all along, which can only end its waiting sooner.
    """

    def __init__(self) -> None:
        self._boundaries: list[int] = []

    def skip(self, boundary: int, limit: int) -> None:
        """Count one visit for everything before `boundary`."""
        if limit <= 0:
            return
        boundaries = self._boundaries
        if len(boundaries) < limit:
            heappush(boundaries, boundary)
            return
        self._trim(limit)
        heappushpop(boundaries, boundary)

    def clear(self) -> None:
        """Forget all visits: requests have another order from now on."""
        self._boundaries.clear()

    def reached(self, seq: int, limit: int) -> bool:
        if limit <= 0:
            return True
        self._trim(limit)
        boundaries = self._boundaries
        return len(boundaries) >= limit and boundaries[0] > seq

    def count(self, seq: int) -> int:
        """How often the request at `seq` was passed over, up to the limit in force."""
        return sum(1 for boundary in self._boundaries if boundary > seq)

    def _trim(self, limit: int) -> None:
        if len(self._boundaries) > limit:  # the limit was lowered
            self._boundaries[:] = sorted(nlargest(limit, self._boundaries))
