"""The port of exit rules: what a rule reads of an idle model, and how long the model stays."""

from collections.abc import Sequence
from typing import Protocol

from cache_manager.model.ids import Tier
from cache_manager.model.request_rates import IdleGaps


class IdleModel(Protocol):
    """One idle model on one GPU, or in one node's store, read only."""

    @property
    def gaps(self) -> IdleGaps:
        """How long the model was idle between its uses, over the cluster."""

    def held_bytes(self, stage: Tier) -> int:
        """The memory that it holds in this stage: of the GPU, of the host, or of the disk."""

    def reload_s(self, stage: Tier) -> float:
        """How long a call would wait for it if it came in this stage."""


class ExitRule(Protocol):
    """For how long an idle model stays in each stage."""

    @classmethod
    def of(cls, parameters: Sequence[float]) -> "ExitRule":
        """The rule with these parameters; ValueError says what is wrong with them."""

    def stays_s(self, stage: Tier, idle: IdleModel) -> float | None:
        """Seconds in this stage, from its beginning; None: until its memory is needed.

        With 0 the model passes through the stage at once.
        """
