"""Predicts how many GPU calls a request makes, so that its lease is given back after the last."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

# After this many consecutive requests with the same number of calls, that number is predicted.
ENOUGH = 5
# A wrong prediction doubles the number of requests needed, up to this limit.
_MOST_ENOUGH = 80
# The number of model sets with a history; the least recently used one is dropped.
_MOST_KNOWN = 256


@dataclass(slots=True)
class _Habit:
    """The latest requests that used the same models, and how many calls each of them made."""

    calls: int = 0
    in_a_row: int = 0
    enough: int = ENOUGH


class Habits:
    """The numbers of calls of this process's finished requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[frozenset[str], _Habit] = OrderedDict()

    def calls(self, models: Iterable[str]) -> int | None:
        """Return after how many calls requests for these models end; None while unpredictable."""
        with self._lock:
            habit = self._known.get(frozenset(models))
            return habit.calls if habit is not None and habit.in_a_row >= habit.enough else None

    def finished(self, models: Iterable[str], calls: int) -> None:
        """Record a request that has ended after `calls` calls (at least one)."""
        with self._lock:
            habit = self._habit(models)
            habit.in_a_row = habit.in_a_row + 1 if habit.calls == calls else 1
            habit.calls = calls

    def note_wrong_guess(self, models: Iterable[str]) -> None:
        """Discard a wrong prediction, and require more requests before the next one."""
        with self._lock:
            habit = self._habit(models)
            habit.calls = habit.in_a_row = 0
            habit.enough = min(2 * habit.enough, _MOST_ENOUGH)

    def _habit(self, models: Iterable[str]) -> _Habit:
        key = frozenset(models)
        habit = self._known.setdefault(key, _Habit())
        self._known.move_to_end(key)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return habit
