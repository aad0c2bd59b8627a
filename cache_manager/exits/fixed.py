"""The same number of seconds for every model: SAGE's rule, 30 s a stage.

`fixed` is SAGE's, `fixed:10` has 10 s a stage, and `fixed:10,20,30,60` has 10 s on the GPU, 20 s as
a context with weights in host memory, 30 s in host memory, and 60 s on disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from cache_manager.exits.exit_rule import IdleModel
from cache_manager.model.ids import Tier

STAGES = (Tier.GPU, Tier.CONTEXT, Tier.HOST, Tier.DISK)
SAGE_S = 30.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Seconds in each of the four stages."""

    seconds: tuple[float, ...] = (SAGE_S,) * len(STAGES)

    @classmethod
    def of(cls, parameters: Sequence[float]) -> "Rule":
        if not parameters:
            return cls()
        if len(parameters) not in {1, len(STAGES)}:
            raise ValueError("it takes one number of seconds, or four: GPU, context, host, disk")
        if not all(isfinite(number) and number >= 0.0 for number in parameters):
            raise ValueError("seconds are finite numbers, 0 or more")
        seconds = tuple(parameters) if len(parameters) > 1 else (parameters[0],) * len(STAGES)
        return cls(seconds)

    def stays_s(self, stage: Tier, idle: IdleModel) -> float | None:
        del idle
        # A model that is gone has no later stage to go to.
        return None if stage is Tier.ABSENT else self.seconds[STAGES.index(stage)]
