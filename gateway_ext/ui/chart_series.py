"""The points of the last minutes for the charts: one value of each kind every few seconds."""

from collections import deque
from collections.abc import Mapping

from gateway_ext.ui.page_state import SERIES, Point


class Series:
    """The last `points` points, `step_s` apart; steps without a measurement are empty."""

    def __init__(self, step_s: float = 5.0, points: int = 120) -> None:
        self.step_s = step_s
        self._points = points
        self._kept: deque[Point] = deque(maxlen=points)
        self._due_s: float | None = None

    def due(self, now_s: float) -> bool:
        """Whether it is time for the next point."""
        return self._due_s is None or now_s >= self._due_s

    def add(self, point: Point, now_s: float) -> list[Point]:
        """Add a point; returns the added points, with empty ones for missed steps."""
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
        """All points, by kind, the oldest first."""
        return {"step_s": self.step_s, "points": self._points, "series": by_kind(self._kept)}


def by_kind(points: "deque[Point] | list[Point]") -> dict[str, list[float | None]]:
    """These points, split by kind."""
    return {kind: [point.get(kind) for point in points] for kind in SERIES}


_NOTHING: Point = dict.fromkeys(SERIES)
