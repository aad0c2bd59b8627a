"""Owners of requests, namespaces and their functions: what they may have, and what they have."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from cache_manager.model.ids import ModelId, Tier
from scheduler.cluster.request_queue import Bundle, Pending, QueuePace
from scheduler.cluster.state import ClusterState
from scheduler.model.owner_terms import OwnerTerms

NO_TERMS = OwnerTerms()
_COMPACT_BEYOND = 64
_LEAST_WEIGHT = 1e-6


Key = TypeVar("Key", int, tuple[float, int])
Item = TypeVar("Item")


class Lineup(Generic[Key, Item]):
    """Items in the order of their keys, which differ.

    What is listed anew, or leaves, leaves an outdated entry in the heap, which is dropped later.
    """

    def __init__(self) -> None:
        self.keys: dict[Item, Key] = {}
        self._heap: list[tuple[Key, int, Item]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self.keys)

    def put(self, item: Item, key: Key) -> None:
        if self.keys.get(item) == key:
            return
        self.keys[item] = key
        self._count += 1
        heappush(self._heap, (key, self._count, item))
        if len(self._heap) > 2 * len(self.keys) + _COMPACT_BEYOND:
            present = enumerate(self.keys.items())
            self._heap = [(listed, number, other) for number, (other, listed) in present]
            heapify(self._heap)

    def drop(self, item: Item) -> None:
        self.keys.pop(item, None)

    def first(self) -> Item | None:
        heap = self._heap
        while heap:
            key, _, item = heap[0]
            if self.keys.get(item) == key:
                return item
            heappop(heap)
        return None


class Turn:
    """What is known of one accepted request besides the request itself.

    `arrival` is its place by arrival. Until its lease is given it is charged `charge_s` seconds of
    GPU time, by estimate, from when it is `exposed` to the policy. `tag_s` is the virtual time of
    its turn. It is `held` back since `since_s`.
    """

    __slots__ = (
        "arrival",
        "charge_s",
        "exposed",
        "head_s",
        "held",
        "owner",
        "pending",
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
        self.held = False
        self.queued = False
        self.exposed = False
        self.since_s = 0.0


class Owner:
    """Terms and counts of one owner.

    `waiting` requests wait, of which `exposed` ones may be placed and `paused` ones wait for GPU
    time of a quota; `leases` are in force, on `rate` slots. `queued_s` is the estimated GPU time of
    what waits, `due_sum_s` the sum of the times at which the leases should end. `virtual_s` is the
    GPU time that it was charged by its weight. It is `limited` if it has a quota.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.terms = NO_TERMS
        self.weight = NO_TERMS.weight
        self.limited = False
        self.waiting = self.exposed = self.paused = self.leases = 0
        self.queued_s = self.due_sum_s = self.rate = 0.0
        self.window: GpuWindow | None = None
        self.virtual_s = 0.0

    @property
    def busy(self) -> bool:
        return self.waiting > 0 or self.leases > 0

    @property
    def contending(self) -> int:
        """How many requests wait for a GPU."""
        return self.waiting - self.paused

    @property
    def at_work(self) -> bool:
        return self.contending > 0 or self.leases > 0

    @property
    def has_its_leases(self) -> bool:
        return self.terms.leases is not None and self.leases >= self.terms.leases

    @property
    def at_its_leases(self) -> bool:
        """Whether it may have no further lease now."""
        most = self.terms.leases
        return most is not None and self.exposed + self.leases >= most

    def take_terms(self, terms: OwnerTerms, now: float) -> None:
        self.terms = terms
        self.weight = max(terms.weight, _LEAST_WEIGHT)
        quotas = terms.gpu_s, terms.resident_bytes, terms.leases, terms.waiting
        self.limited = quotas != (None, None, None, None)
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

    Of these `turns` wait for their turn; `paused_turns` are the others. `models` are those that it
    named, if it has a quota of resident bytes of its own.
    """

    def __init__(self, name: str, number: int, space: "TenantSpace") -> None:
        super().__init__(name, number)
        self.space = space
        self.turns: Lineup[int, Turn] = Lineup()
        self.models: dict[ModelId, None] = {}
        self.paused_turns: OrderedDict[Turn, None] = OrderedDict()

    @property
    def held(self) -> int:
        return len(self.turns)

    @property
    def has_quotas(self) -> bool:
        """Whether some quota of its own, or of its namespace, holds for it."""
        return self.limited or self.space.limited


class TenantSpace(Owner):
    """A tenant; its functions share its part.

    `turn_s` is the virtual time among these, `pace` that of its requests while some of them wait.
    Of each function with paused calls one is `resumed` until it has its lease, and should need so
    many seconds; those `behind` may have room when something of the namespace needs less.
    """

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name, number)
        self.resumed: dict[FunctionOwner, tuple[Turn, float]] = {}
        self.behind: dict[FunctionOwner, None] = {}
        self.functions: dict[str, FunctionOwner] = {}
        self.pace = QueuePace()
        # By virtual time; functions of the same one by their numbers.
        self.turns: Lineup[tuple[float, int], FunctionOwner] = Lineup()
        self.turn_s = 0.0

    def part(self) -> None:
        """It is forgotten: without references to its functions nothing waits for the collector."""
        self.functions.clear()
        self.resumed.clear()
        self.turns = Lineup()


_PARTS = 60


class GpuWindow:
    """GPU seconds used in the last `window_s`, running leases included.

    What was used is kept in parts of a sixtieth of the window, and a part leaves as a whole: so it
    counts never less than what was used in the window, and at most that of one part more.
    """

    def __init__(self, window_s: float, now: float) -> None:
        self.window_s = window_s
        self._part_s = window_s / _PARTS
        self._parts: deque[tuple[int, float]] = deque()
        self._since_s = now
        self._total_s = 0.0

    def used_s(self, rate: float, now: float) -> float:
        """What was used until now, since the last look at this many slots at a time."""
        self.advance(rate, now)
        return self._total_s

    def seen_s(self, rate: float, now: float) -> float:
        """The same for who only looks: nothing is noted, so a recording replays without it."""
        gone_s = now - self.window_s
        old_s = sum(amount for part, amount in self._parts if (part + 1) * self._part_s <= gone_s)
        lately_s = max(0.0, now - max(self._since_s, gone_s))
        return max(0.0, self._total_s - old_s) + rate * lately_s

    def advance(self, rate: float, now: float) -> None:
        """Count what `rate` slots have used since the last look, and forget what is too old."""
        part_s, parts = self._part_s, self._parts
        begins_s = max(self._since_s, now - self.window_s - part_s)
        while rate > 0.0 and begins_s < now:
            part = int(begins_s / part_s)
            ends_s = min(now, (part + 1) * part_s)
            if ends_s <= begins_s:  # a time that lies on the edge of a part, but for its last digit
                part, ends_s = part + 1, min(now, (part + 2) * part_s)
            self._add(part, rate * (ends_s - begins_s))
            begins_s = ends_s
        self._since_s = max(self._since_s, now)
        while parts and (parts[0][0] + 1) * part_s <= now - self.window_s:
            self._total_s -= parts.popleft()[1]
        if not parts:
            self._total_s = 0.0

    def add(self, amount_s: float, now: float) -> None:
        self._add(int(now / self._part_s), amount_s)

    def give_back(self, amount_s: float) -> None:
        """So much of what was counted last was not used."""
        parts = self._parts
        while parts and amount_s > 0.0:
            part, used_s = parts.pop()
            less_s = min(used_s, amount_s)
            amount_s -= less_s
            self._total_s -= less_s
            if used_s > less_s:
                parts.append((part, used_s - less_s))

    def frees_in_s(self, short_s: float, now: float) -> float | None:
        """In how many seconds so much will have left, if nothing more is used; None: never."""
        for part, amount_s in self._parts:
            short_s -= amount_s
            if short_s <= 0.0:
                return (part + 1) * self._part_s + self.window_s - now
        return None

    def _add(self, part: int, amount_s: float) -> None:
        parts = self._parts
        if parts and parts[-1][0] >= part:
            parts[-1] = parts[-1][0], parts[-1][1] + amount_s
        else:
            parts.append((part, amount_s))
        self._total_s += amount_s


# Owners without terms are remembered for as long as their virtual time lasts, but no more of them.
_MOST_OWNERS = 200


def namespace_of(function: str) -> str:
    """The namespace of a function, as requests name it; empty if it names none."""
    space, slash, _ = function.partition("/")
    return space if slash else ""


class SummedWeight:
    """How much weight some namespaces have together."""

    def __init__(self, spaces: Iterable[TenantSpace] = ()) -> None:
        self._spaces = dict.fromkeys(spaces)
        self.weight = float(sum([space.weight for space in self._spaces]))

    def follow(self, space: TenantSpace, *, is_one: bool) -> None:
        """This namespace is one of them from now on, or is not."""
        if is_one == (space in self._spaces):
            return
        if is_one:
            self._spaces[space] = None
            self.weight += space.weight
        else:
            del self._spaces[space]
            self.weight = self.weight - space.weight if self._spaces else 0.0


class OwnerTable:
    """Namespaces and their functions; functions that name no namespace are of one without a name.

    One that has no terms and nothing to do is forgotten once its virtual time has passed: it has
    no advantage of that. If there are too many, also those are forgotten whose has not.
    """

    def __init__(self) -> None:
        """`busy` is the weight of those at work, `waiting` of those of which requests wait."""
        self.terms: dict[str, OwnerTerms] = {}
        # Of owners that have terms: how many requests each quota has refused.
        self.refused: dict[str, Counter[str]] = {}
        self.spaces: dict[str, TenantSpace] = {}
        self.functions: dict[str, FunctionOwner] = {}
        self.busy = SummedWeight()
        self.waiting = SummedWeight()
        self._made = 0
        self._due = _MOST_OWNERS

    def of(self, function: str) -> FunctionOwner:
        owner = self.functions.get(function)
        return self._new_function(function) if owner is None else owner

    def set_terms(self, name: str, terms: OwnerTerms | None, now: float) -> None:
        """These terms hold for an owner from now on; None: no terms of its own."""
        if terms is None:
            self.terms.pop(name, None)
            self.refused.pop(name, None)
        else:
            self.terms[name] = terms
        owner = self.functions.get(name) if "/" in name else self.spaces.get(name)
        if owner is not None:
            owner.take_terms(NO_TERMS if terms is None else terms, now)
            self._weigh()

    def count_refusal(self, owner: str, quota: str) -> None:
        self.refused.setdefault(owner, Counter())[quota] += 1

    def functions_of(self, name: str) -> dict[FunctionOwner, None]:
        """The known functions that an owner is, or has."""
        if "/" in name:
            function = self.functions.get(name)
            return {} if function is None else {function: None}
        space = self.spaces.get(name)
        return {} if space is None else dict.fromkeys(space.functions.values())

    def count(
        self,
        owner: FunctionOwner,
        *,
        waiting: int = 0,
        paused: int = 0,
        leases: int = 0,
        queued_s: float = 0.0,
    ) -> None:
        """A function, and so its namespace, has so much more of each."""
        space = owner.space
        for counted in (owner, space):
            counted.waiting += waiting
            counted.paused += paused
            counted.leases += leases
            counted.queued_s += queued_s
        contends = space.waiting > space.paused
        self.waiting.follow(space, is_one=contends)
        self.busy.follow(space, is_one=contends or space.leases > 0)
        if not contends:
            space.pace.pause()

    def wait_s(self, function: str, pace: QueuePace) -> float:
        """The expected wait of a new request of this function, where namespaces take turns.

        It is behind those of its own namespace, and behind as many of each other one that waits as
        the weights say: these may come later, and go before it. If its namespace moves more slowly
        than that, its own pace tells the wait.
        """
        space = self.of(function).space
        others = self.waiting.weight - (space.weight if space.contending else 0.0)
        ahead = int(space.contending * (others + space.weight) / space.weight)
        return max(pace.wait_s(ahead), space.pace.wait_s(space.contending))

    def may_wait(self, function: str, limit: int, *, paused: bool) -> bool:
        """Whether its namespace may have one more request among `limit` that wait, or are paused.

        It leaves room for the others that are at work, and for one more.
        """
        space = self.of(function).space
        others = self.busy.weight - (space.weight if space.at_work else 0.0)
        own = space.paused if paused else space.contending
        return own < max(1.0, limit * space.weight / (others + space.weight + 1.0))

    def forget_when_due(self, virtual_s: float) -> None:
        """Forget owners, if there are many."""
        if len(self.functions) <= self._due:
            return
        for lasting in (False, True):
            for owner in list(self.functions.values()):
                passed = lasting or (
                    owner.virtual_s <= owner.space.turn_s and owner.space.virtual_s <= virtual_s
                )
                if passed and not owner.busy and owner.name not in self.terms:
                    self._forget(owner)
            if len(self.functions) <= _MOST_OWNERS // 2:
                break
        self._due = max(_MOST_OWNERS, 2 * len(self.functions))

    def pause(self) -> None:
        """No GPU is offered: the time until the next placement is not the pace of one."""
        for space in self.spaces.values():
            space.pace.pause()

    def clear(self) -> None:
        """Forget all owners, but not their terms."""
        for space in self.spaces.values():
            space.part()
        self.spaces.clear()
        self.functions.clear()
        self.busy = SummedWeight()
        self.waiting = SummedWeight()

    def _new_function(self, function: str) -> FunctionOwner:
        name = namespace_of(function)
        space = self.spaces.get(name)
        if space is None:
            space = self.spaces[name] = TenantSpace(name, self._number())
            space.take_terms(self.terms.get(name, NO_TERMS), 0.0)
        owner = FunctionOwner(function, self._number(), space)
        if "/" in function:
            owner.take_terms(self.terms.get(function, NO_TERMS), 0.0)
        self.functions[function] = space.functions[function] = owner
        return owner

    def _number(self) -> int:
        self._made += 1
        return self._made

    def _forget(self, owner: FunctionOwner) -> None:
        space = owner.space
        del self.functions[owner.name], space.functions[owner.name]
        if not space.functions and space.name not in self.terms:
            self.spaces.pop(space.name).part()

    def _weigh(self) -> None:
        spaces = self.spaces.values()
        self.busy = SummedWeight(space for space in spaces if space.at_work)
        self.waiting = SummedWeight(space for space in spaces if space.contending)


def both(owner: FunctionOwner) -> tuple[Owner, Owner]:
    """A function and its namespace: the terms of both hold."""
    return owner, owner.space


def estimate_s(bundle: Bundle, cluster: ClusterState) -> float:
    """The GPU time of one request, with the load if it seems to need one."""
    run_s = cluster.profiles.usual_runs_s(bundle.models)
    if cluster.index.held(bundle.models):
        return run_s
    return run_s + cluster.profiles.all_loads_s(bundle.models, Tier.DISK)
