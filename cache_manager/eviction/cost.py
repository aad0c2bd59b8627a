"""Cheapest to miss first: reload cost times the probability of use, by bytes and by copies."""

from collections.abc import Iterable
from dataclasses import dataclass

from cache_manager.eviction.eviction_rule import MemoryView, ResidentView, UsageView


@dataclass(frozen=True, slots=True)
class Rule:
    """A model's worth is its load seconds x its requests a second / (its bytes x its copies).

    The models whose memory buys least leave first; of equal ones the least recently used.
    """

    def order(self, memory: MemoryView, usage: UsageView, now: float) -> Iterable[ResidentView]:
        def worth(resident: ResidentView) -> float:
            expected_s = usage.load_s(resident.model) * usage.rate(resident.model, now)
            return expected_s / (max(1, resident.bytes) * max(1, usage.copies(resident.model)))

        return sorted(memory.residents.values(), key=worth)
