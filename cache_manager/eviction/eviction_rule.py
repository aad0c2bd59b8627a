"""The port of eviction rules: what a rule reads, and the order that it returns."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from cache_manager.model.ids import ModelId


class ResidentView(Protocol):
    """One model in the memory that lacks room, read only."""

    @property
    def model(self) -> ModelId: ...
    @property
    def bytes(self) -> int: ...
    @property
    def used_s(self) -> float: ...
    @property
    def kept(self) -> bool: ...


class MemoryView(Protocol):
    """A GPU's memory, or a tier of a node below it, read only."""

    @property
    def residents(self) -> Mapping[ModelId, ResidentView]:
        """From the least to the most recently used."""


class UsageView(Protocol):
    """Facts about a model over the whole cluster (of a lower tier: the node), read only."""

    def copies(self, model: ModelId) -> int:
        """On how many GPUs (in how many tiers of this kind) the model is resident."""

    def rate(self, model: ModelId, now: float) -> float:
        """Requests for the model per second, with recent ones weighted most."""

    def load_s(self, model: ModelId) -> float: ...

    def run_s(self, model: ModelId) -> float: ...


class EvictionRule(Protocol):
    """In which order models leave a GPU's or a node's memory when room is needed.

    A rule may name models that are in use: the index passes over every locked one, and that of a
    lower tier takes those in use last.
    """

    def order(self, memory: MemoryView, usage: UsageView, now: float) -> Iterable[ResidentView]:
        """The residents of this memory, the first to leave first."""
