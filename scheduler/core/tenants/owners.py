"""Owners of requests, namespaces and their functions: what they may have, and what they have."""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from math import inf

from cache_manager.model.ids import ModelId
from scheduler.core.state.pending import Pending
from scheduler.core.state.queues.queue_pace import QueuePace
from scheduler.core.tenants.gpu_window import GpuWindow
from scheduler.model.owner_terms import OwnerTerms

NO_TERMS = OwnerTerms()
_UNLISTED = inf
_COMPACT_BEYOND = 64
_LEAST_WEIGHT = 1e-6


class Turn:
    """What is known of one accepted request besides the request itself.

    `arrival` is its place by arrival. Until its lease is given it is charged `charge_s` seconds of
    GPU time, by estimate, from when it is `exposed` to the policy. `tag_s` is the virtual time of
    its turn. `place` names its present entry among those held back, since `since_s`. It `pauses`
    while a quota of GPU time has no room for its call, which has used a GPU before.
    """

    __slots__ = (
        "arrival",
        "charge_s",
        "exposed",
        "head_s",
        "held_for",
        "held_s",
        "owner",
        "pauses",
        "pending",
        "place",
        "queued",
        "since_s",
        "tag_s",
    )

    def __init__(self, pending: Pending, owner: "FunctionOwner", head_s: float) -> None:
        self.pending = pending
        self.owner = owner
        self.arrival = pending.seq
        self.head_s = head_s
        self.charge_s = 0.0
        self.tag_s = 0.0
        self.place = 0
        self.queued = False
        self.exposed = False
        self.pauses = False
        self.since_s = 0.0
        self.held_s = 0.0
        self.held_for = ""

    def note_held(self, now: float) -> None:
        """It was held back until now."""
        self.held_s += now - self.since_s


class Owner:
    """Terms and counts of one owner.

    `waiting` requests wait, of which `exposed` ones may be placed and `paused` ones wait for GPU
    time of a quota; `leases` are in force, on `rate` slots. `queued_s` is the estimated GPU time of
    what waits, `due_sum_s` the sum of the times at which the leases should end. `virtual_s` is the
    GPU time that it was charged by its weight, and `listed_s` where in the order of turns it is
    listed.
    """

    __slots__ = (
        "due_sum_s",
        "exposed",
        "leases",
        "listed_s",
        "name",
        "number",
        "paused",
        "queued_s",
        "rate",
        "terms",
        "virtual_s",
        "waiting",
        "window",
    )

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.terms = NO_TERMS
        self.waiting = self.exposed = self.paused = self.leases = 0
        self.queued_s = self.due_sum_s = self.rate = 0.0
        self.window: GpuWindow | None = None
        self.virtual_s = 0.0
        self.listed_s = _UNLISTED

    def __lt__(self, other: "Owner") -> bool:
        """Two entries of one owner at one time: any order will do."""
        return False

    def __hash__(self) -> int:
        """The same as without an order, which compiled classes otherwise have instead of it."""
        return id(self)

    @property
    def weight(self) -> float:
        return max(self.terms.weight, _LEAST_WEIGHT)

    @property
    def busy(self) -> bool:
        """Whether it has requests that wait, or leases."""
        return self.waiting > 0 or self.leases > 0

    @property
    def contending(self) -> int:
        """How many requests wait for a GPU."""
        return self.waiting - self.paused

    @property
    def at_work(self) -> bool:
        """Whether it has leases, or requests that wait for a GPU."""
        return self.contending > 0 or self.leases > 0

    @property
    def has_its_leases(self) -> bool:
        """Whether it has all leases that it may have."""
        return self.terms.leases is not None and self.leases >= self.terms.leases

    @property
    def at_its_leases(self) -> bool:
        """Whether it may have no further lease now."""
        most = self.terms.leases
        return most is not None and self.exposed + self.leases >= most

    def take_terms(self, terms: OwnerTerms, now: float) -> None:
        """These terms hold from now on."""
        self.terms = terms
        if terms.gpu_s is None:
            self.window = None
        elif self.window is None or self.window.window_s != terms.window_s:
            self.window = GpuWindow(terms.window_s, now)

    def run(self, slots: float, now: float) -> None:
        """It has so many more slots from now on."""
        if self.window is not None:
            self.window.advance(self.rate, now)
        self.rate += slots
        if not self.leases:
            self.rate = self.due_sum_s = 0.0  # without what sums of floats leave

    def correct(self, used_s: float, now: float) -> None:
        """It has used so much more than its slots' time says, or less."""
        if self.window is not None:
            self.window.advance(self.rate, now)
            if used_s > 0.0:
                self.window.add(used_s, now)
            else:
                self.window.give_back(-used_s)

    def used_s(self, now: float) -> float:
        """The GPU time that it has used in its window."""
        return 0.0 if self.window is None else self.window.used_s(self.rate, now)

    def seen_s(self, now: float) -> float:
        """The same for who only looks."""
        return 0.0 if self.window is None else self.window.seen_s(self.rate, now)

    def to_come_s(self, now: float) -> float:
        """The GPU time that its accepted requests should still need."""
        return (max(0.0, self.queued_s) if self.waiting else 0.0) + self.running_s(now)

    def running_s(self, now: float) -> float:
        """The GPU time that its leases should still need."""
        return max(0.0, self.due_sum_s - self.rate * now)


class FunctionOwner(Owner):
    """A function of a namespace, and those of its requests that are held back.

    Of these `held` wait for their turn; `paused_turns` are the others. It is `stuck` while its
    first request has no room within a quota of resident bytes. `models` are those that it named, if
    it has such a quota of its own.
    """

    __slots__ = ("_heap", "held", "models", "paused_turns", "space", "stuck")

    def __init__(self, name: str, number: int, space: "TenantSpace") -> None:
        super().__init__(name, number)
        self.space = space
        self.held = 0
        self.stuck = False
        self.models: dict[ModelId, None] = {}
        self.paused_turns: OrderedDict[Turn, None] = OrderedDict()
        self._heap: list[tuple[int, int, Turn]] = []

    def hold(self, turn: Turn, key: int, place: int) -> None:
        """Hold one more request back, in the order of the keys."""
        turn.place = place
        self.held += 1
        heappush(self._heap, (key, place, turn))
        if len(self._heap) > 2 * self.held + _COMPACT_BEYOND:
            self._heap = [entry for entry in self._heap if entry[2].place == entry[1]]
            heapify(self._heap)

    def let_go(self, turn: Turn) -> None:
        """A request is held back no more."""
        turn.place = 0
        self.held -= 1

    def first(self) -> Turn | None:
        """The request that is next."""
        heap = self._heap
        while heap:
            _, place, turn = heap[0]
            if turn.place == place:
                return turn
            heappop(heap)
        return None


class OwnerOrder:
    """Owners whose requests are held back, in the order of their turns."""

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._count = 0
        self._heap: list[tuple[float, int, Owner]] = []

    def list(self, owner: Owner, key_s: float) -> None:
        """Its turn is at this virtual time."""
        if owner.listed_s == key_s:
            return
        if owner.listed_s == _UNLISTED:
            self._count += 1
        owner.listed_s = key_s
        heappush(self._heap, (key_s, owner.number, owner))
        if len(self._heap) > 2 * self._count + _COMPACT_BEYOND:
            entries = {entry[1]: entry for entry in self._heap if entry[2].listed_s == entry[0]}
            self._heap = list(entries.values())
            heapify(self._heap)

    def unlist(self, owner: Owner) -> None:
        """It has no turn now."""
        if owner.listed_s != _UNLISTED:
            self._count -= 1
            owner.listed_s = _UNLISTED

    def first(self) -> Owner | None:
        """Whose turn is first."""
        heap = self._heap
        while heap:
            key_s, _, owner = heap[0]
            if owner.listed_s == key_s:
                return owner
            heappop(heap)
        return None


class TenantSpace(Owner):
    """A tenant; its functions share its part.

    `turn_s` is the virtual time among these, `pace` that of its requests while some of them wait.
    """

    __slots__ = ("functions", "pace", "turn_s", "turns")

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name, number)
        self.functions: dict[str, FunctionOwner] = {}
        self.pace = QueuePace()
        self.turns = OwnerOrder()
        self.turn_s = 0.0

    def part(self) -> None:
        """It is forgotten: without references to its functions nothing waits for the collector."""
        self.functions.clear()
        self.turns = OwnerOrder()


def is_listed(owner: Owner) -> bool:
    """Whether it has a turn."""
    return owner.listed_s != _UNLISTED
