"""The page's state in sections, and the changes between two states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# One JSON object; states are compared by value, so an object is never changed.
Json = Mapping[str, Any]

# The series of the charts; an unknown point is None.
SERIES = ("throughput", "hit_ratio", "p50", "p95", "p99", "queue")
Point = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class PageState:
    """Everything at one moment.

    `whole` are sections that are replaced as a whole, `items` are sections whose items are replaced
    one by one, by id. `spent_s` is the processor time of the look, here and at the scheduler.
    """

    whole: Mapping[str, Any]
    items: Mapping[str, Mapping[str, Json]]
    spent_s: float = 0.0


@dataclass(slots=True)
class PageChanges:
    """What differs between two looks: sections, and by section items that are new or gone."""

    whole: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, list[Json]] = field(default_factory=dict)
    removed: dict[str, list[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.whole or self.replaced or self.removed)
