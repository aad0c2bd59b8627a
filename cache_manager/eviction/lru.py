"""Least recently used first, each GPU for itself: the thesis's rule (Algorithm 3)."""

from collections.abc import Iterable
from dataclasses import dataclass

from cache_manager.eviction.base import GpuView, ResidentView, UsageView


@dataclass(frozen=True, slots=True)
class Rule:
    """The model that this GPU has not used for the longest time leaves first."""

    def order(self, gpu: GpuView, usage: UsageView, now: float) -> Iterable[ResidentView]:
        return gpu.residents.values()
