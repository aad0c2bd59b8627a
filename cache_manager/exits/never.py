"""No exit by time: idle models leave only where memory is needed."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache_manager.exits.exit_rule import IdleModel
from cache_manager.model.ids import Tier


@dataclass(frozen=True, slots=True)
class Rule:
    """Every model stays where it is."""

    @classmethod
    def of(cls, parameters: Sequence[float]) -> "Rule":
        if parameters:
            raise ValueError("it has no parameters")
        return cls()

    def stays_s(self, stage: Tier, idle: IdleModel) -> float | None:
        del stage, idle
        return None
