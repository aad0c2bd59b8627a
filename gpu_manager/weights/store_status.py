"""The weight store's status and its counts."""

from dataclasses import dataclass

from cache_manager.tier_index import Demotion
from gpu_manager.weights.spill_directory import SpillCounts


@dataclass(slots=True)
class StoreCounts:
    """Counts of the store's operations since the start."""

    adopted: int = 0
    duplicates: int = 0
    proofs: int = 0
    proofs_refused: int = 0
    evicted: int = 0
    lost: int = 0  # evicted with no copy on disk


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store's current content.

    `kept_bytes` count against the budget. `lingering_bytes` were evicted, but are still mapped:
    they are freed when their last holder releases them. `rule` is the eviction rule of host memory,
    `demotions` are its latest decisions.
    """

    images: int
    kept_bytes: int
    lingering_bytes: int
    reserved_bytes: int
    budget_bytes: int
    disk_images: int
    disk_bytes: int
    counts: StoreCounts
    spill: SpillCounts
    rule: str
    demotions: tuple[Demotion, ...]
