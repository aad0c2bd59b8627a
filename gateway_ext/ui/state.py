"""The page's state in sections, the changes between two states, the charts' points; its port."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# One JSON object; states are compared by value, so an object is never changed.
Json = Mapping[str, Any]

# The series of the charts; an unknown point is None.
SERIES = ("throughput", "hit_ratio", "p50", "p95", "p99", "queue")
Point = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class PageState:
    """Everything at one moment."""

    whole: Mapping[str, Any]  # sections that are replaced as a whole
    items: Mapping[str, Mapping[str, Json]]  # sections whose items are replaced one by one, by id
    spent_s: float = 0.0  # the processor time of the look, here and at the scheduler


class Series:
    """The last `points` points, `step_s` apart; steps without a measurement are empty."""

    def __init__(self, step_s: float = 5.0, points: int = 120) -> None:
        self.step_s = step_s
        self._points = points
        self._kept: deque[Point] = deque(maxlen=points)
        self._due_s: float | None = None

    def due(self, now_s: float) -> bool:
        return self._due_s is None or now_s >= self._due_s

    def add(self, point: Point, now_s: float) -> list[Point]:
        """Return the added points, with empty ones for missed steps."""
        missed = 0
        if self._due_s is not None:
            missed = int((now_s - self._due_s) / self.step_s)
        added: list[Point] = [_NOTHING] * min(self._points, missed)
        added.append(point)
        self._kept.extend(added)
        due_s = now_s if self._due_s is None else self._due_s + missed * self.step_s
        self._due_s = due_s + self.step_s
        return added

    def shown(self) -> Mapping[str, object]:
        return {"step_s": self.step_s, "points": self._points, "series": by_kind(self._kept)}


def by_kind(points: "deque[Point] | list[Point]") -> dict[str, list[float | None]]:
    return {kind: [point.get(kind) for point in points] for kind in SERIES}


_NOTHING: Point = dict.fromkeys(SERIES)


def changes(old: PageState, new: PageState) -> dict[str, Any]:
    """What differs: whole sections, and of the others the items that are new, changed or gone."""
    changed: dict[str, Any] = {}
    for section, value in new.whole.items():
        before = old.whole.get(section)
        if before is not value and before != value:
            changed[section] = value
    for section, items in new.items.items():
        before_items = old.items.get(section, {})
        replaced = _replaced(before_items, items)
        removed = [key for key in before_items if key not in items]
        if replaced or removed:
            changed[section] = {"replaced": replaced, "removed": removed}
    return changed


def _replaced(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[Json]:
    """Items that are new or changed; the same object need not be compared."""
    if old is new:
        return []
    changed = []
    for key, item in new.items():
        before = old.get(key)
        if before is not item and before != item:
            changed.append(item)
    return changed
