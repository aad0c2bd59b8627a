"""LRU with a view of the whole cluster: spare copies and cold models leave before hot last ones."""

from collections.abc import Iterable
from dataclasses import dataclass

from cache_manager.eviction.eviction_rule import MemoryView, ResidentView, UsageView

_COLD_PER_S = 0.05
_SPARE_BELOW = 0.4


@dataclass(frozen=True, slots=True)
class Rule:
    """The thesis's future work (chapter 6): a local LRU may evict a hot model's only copy.

    A model may go early if it is cold (fewer than one request in 20 s of late), or if
    its other copies suffice (they would be busy less than 0.4 of the time without this
    one). Such models leave first, the others after them, each group least recently used first.
    """

    def order(self, memory: MemoryView, usage: UsageView, now: float) -> Iterable[ResidentView]:
        return sorted(
            memory.residents.values(), key=lambda resident: self._needed(resident, usage, now)
        )

    def _needed(self, resident: ResidentView, usage: UsageView, now: float) -> bool:
        rate = usage.rate(resident.model, now)
        if rate < _COLD_PER_S:
            return False
        others = usage.copies(resident.model) - 1
        return others <= 0 or rate * usage.run_s(resident.model) / others >= _SPARE_BELOW
