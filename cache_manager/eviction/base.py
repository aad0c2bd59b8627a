"""What an eviction rule is given and what it must answer."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from cache_manager.model import ModelId


class ResidentView(Protocol):
    """One model in one GPU's memory, read only."""

    @property
    def model(self) -> ModelId: ...
    @property
    def bytes(self) -> int: ...
    @property
    def used_s(self) -> float: ...
    @property
    def kept(self) -> bool: ...


class GpuView(Protocol):
    """One GPU's memory, read only."""

    @property
    def residents(self) -> Mapping[ModelId, ResidentView]:
        """From the least to the most recently used."""
        ...


class UsageView(Protocol):
    """What is known of a model over the whole cluster, read only."""

    def copies(self, model: ModelId) -> int:
        """On how many GPUs the model is resident."""
        ...

    def rate(self, model: ModelId, now: float) -> float:
        """Requests for it a second, of late."""
        ...

    def load_s(self, model: ModelId) -> float:
        """The seconds that bringing it back would cost."""
        ...

    def run_s(self, model: ModelId) -> float:
        """The seconds of one inference."""
        ...


class EvictionRule(Protocol):
    """In which order models leave one GPU when room is needed.

    A rule may name models that are in use: the index passes over every locked one.
    """

    def order(self, gpu: GpuView, usage: UsageView, now: float) -> Iterable[ResidentView]:
        """The GPU's residents, the first to leave first."""
        ...
