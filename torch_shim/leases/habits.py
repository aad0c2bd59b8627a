"""How many GPU calls a function's requests make, so that a lease goes back after the last one."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

# So many requests that made the same number of calls one after the other make a habit.
ENOUGH = 5
# A guess that was wrong doubles what is enough, up to this many.
_MOST_WANTED = 80
# The models of requests, of which the latest are remembered.
_MOST_KNOWN = 256


@dataclass(slots=True)
class _Habit:
    """The latest requests that used the same models: how many calls each of them made."""

    calls: int = 0
    in_a_row: int = 0
    enough: int = ENOUGH


class Habits:
    """What the finished requests of this process have taught. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[frozenset[str], _Habit] = OrderedDict()

    def calls(self, models: Iterable[str]) -> int | None:
        """After how many calls requests that use these models end; None while that is not sure."""
        with self._lock:
            habit = self._known.get(frozenset(models))
            return habit.calls if habit is not None and habit.in_a_row >= habit.enough else None

    def finished(self, models: Iterable[str], calls: int) -> None:
        """A request has ended, which made so many calls, at least one."""
        with self._lock:
            habit = self._habit(models)
            habit.in_a_row = habit.in_a_row + 1 if habit.calls == calls else 1
            habit.calls = calls

    def mistaken(self, models: Iterable[str]) -> None:
        """A request made a further call: nothing is sure any more, and will not be for longer."""
        with self._lock:
            habit = self._habit(models)
            habit.calls = habit.in_a_row = 0
            habit.enough = min(2 * habit.enough, _MOST_WANTED)

    def _habit(self, models: Iterable[str]) -> _Habit:
        key = frozenset(models)
        habit = self._known.setdefault(key, _Habit())
        self._known.move_to_end(key)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return habit
