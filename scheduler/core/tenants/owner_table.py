"""All owners that are known, by name, and how much weight those have that are at work."""

from collections.abc import Iterable

from scheduler.core.state.queues.queue_pace import QueuePace
from scheduler.core.tenants.owners import NO_TERMS, FunctionOwner, Owner, TenantSpace
from scheduler.model.owner_terms import OwnerTerms

# Owners without terms are remembered for as long as their virtual time lasts, but no more of them.
_MOST_OWNERS = 200


def namespace_of(function: str) -> str:
    """The namespace of a function, as requests name it; empty if it names none."""
    space, slash, _ = function.partition("/")
    return space if slash else ""


class SummedWeight:
    """How much weight some namespaces have together."""

    __slots__ = ("_count", "weight")

    def __init__(self, weights: Iterable[float] = ()) -> None:
        found = tuple(weights)
        self._count = len(found)
        self.weight = float(sum(found))

    def follow(self, space: TenantSpace, *, was_one: bool, is_one: bool) -> None:
        """One of them has come, or left."""
        if is_one != was_one:
            self._count += 1 if is_one else -1
            change = space.weight if is_one else -space.weight
            self.weight = self.weight + change if self._count else 0.0


class OwnerTable:
    """Namespaces and their functions; functions that name no namespace are of one without a name.

    One that has no terms and nothing to do is forgotten once its virtual time has passed: it has
    no advantage of that. If there are too many, also those are forgotten whose has not.
    """

    def __init__(self) -> None:
        """`busy` is the weight of those at work, `waiting` of those of which requests wait."""
        self.terms: dict[str, OwnerTerms] = {}
        self.spaces: dict[str, TenantSpace] = {}
        self.functions: dict[str, FunctionOwner] = {}
        self.busy = SummedWeight()
        self.waiting = SummedWeight()
        self._made = 0
        self._due = _MOST_OWNERS

    def of(self, function: str) -> FunctionOwner:
        """The owner of a request of this function."""
        owner = self.functions.get(function)
        return self._new_function(function) if owner is None else owner

    def set_terms(self, name: str, terms: OwnerTerms | None, now: float) -> None:
        """These terms hold for an owner from now on; None: no terms of its own."""
        if terms is None:
            self.terms.pop(name, None)
        else:
            self.terms[name] = terms
        owner = self.functions.get(name) if "/" in name else self.spaces.get(name)
        if owner is not None:
            owner.take_terms(NO_TERMS if terms is None else terms, now)
            self._weigh()

    def functions_of(self, name: str) -> dict[FunctionOwner, None]:
        """The known functions that an owner is, or has."""
        if "/" in name:
            function = self.functions.get(name)
            return {} if function is None else {function: None}
        space = self.spaces.get(name)
        return {} if space is None else dict.fromkeys(space.functions.values())

    def count(self, owner: FunctionOwner, waiting: int, leases: int, paused: int = 0) -> None:
        """A function, and so its namespace, has so many more requests that wait, and leases."""
        space = owner.space
        worked, contended = space.at_work, space.contending > 0
        for each in both(owner):
            each.waiting += waiting
            each.leases += leases
            each.paused += paused
        self.busy.follow(space, was_one=worked, is_one=space.at_work)
        self.waiting.follow(space, was_one=contended, is_one=space.contending > 0)
        if not space.contending:
            space.pace.pause()

    def count_placed(self, function: str, count: int, now: float) -> None:
        """Requests of a function were placed: its namespace's pace, if others of it wait."""
        space = self.of(function).space
        if space.contending:
            space.pace.placed(count, now)

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
        self.busy = SummedWeight(space.weight for space in spaces if space.at_work)
        self.waiting = SummedWeight(space.weight for space in spaces if space.contending)


def both(owner: FunctionOwner) -> tuple[Owner, Owner]:
    """A function and its namespace: the terms of both hold."""
    return owner, owner.space
