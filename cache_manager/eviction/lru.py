"""Least recently used first, each memory by itself: the thesis's rule (Algorithm 3)."""

from collections.abc import Iterable
from dataclasses import dataclass

from cache_manager.eviction.eviction_rule import MemoryView, ResidentView, UsageView


@dataclass(frozen=True, slots=True)
class Rule:
    """The model that was last used the longest time ago in this memory leaves first."""

    def order(self, memory: MemoryView, usage: UsageView, now: float) -> Iterable[ResidentView]:
        return memory.residents.values()
