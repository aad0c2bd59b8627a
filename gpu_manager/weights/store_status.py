"""What the weight store holds and what has happened to it, as numbers."""

from dataclasses import dataclass

from cache_manager.tiers.demotion import Demotion
from gpu_manager.weights.spill_directory import SpillCounts


@dataclass(slots=True)
class StoreCounts:
    """What has happened in the store since the start."""

    adopted: int = 0
    duplicates: int = 0
    proofs: int = 0
    proofs_refused: int = 0
    evicted: int = 0
    lost: int = 0  # evicted with no copy on disk


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What the store holds now.

    `kept_bytes` count against the budget. `lingering_bytes` were evicted, but are still
    mapped: they are free as soon as the last holder is gone. `rule` is the eviction rule of host
    memory, `demotions` are its latest decisions.
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
