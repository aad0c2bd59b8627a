"""Fixed times: SAGE's rule, 30 seconds a stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from cache_manager.model.ids import Stage
from cache_manager.tiers.exits.exit_rule import IdleModel

_STAGES = (Stage.GPU, Stage.CONTEXT, Stage.HOST, Stage.DISK)
_SAGE_S = 30.0


@dataclass(frozen=True, slots=True)
class Rule:
    """The same seconds for every stage, or those of each."""

    seconds: tuple[float, ...] = (_SAGE_S,) * len(_STAGES)

    @classmethod
    def of(cls, parameters: Sequence[float]) -> "Rule":
        if len(parameters) not in {0, 1, len(_STAGES)}:
            raise ValueError("no number, one for all stages, or four")
        if not all(isfinite(each) and each >= 0.0 for each in parameters):
            raise ValueError("seconds from 0 are expected")
        if not parameters:
            return cls()
        return cls(tuple(parameters) * (len(_STAGES) // len(parameters)))

    def stays_s(self, stage: Stage, idle: IdleModel) -> float | None:
        del idle
        return self.seconds[_STAGES.index(stage)]
