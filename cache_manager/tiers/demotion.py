"""Why room was made in a tier as it was: the candidates at the time of the decision."""

from dataclasses import dataclass

from cache_manager.model.ids import ModelId


@dataclass(frozen=True, slots=True)
class DemotionCandidate:
    """One model's weights that could have left; times and rates as the rule saw them.

    `held` weights are in use: their memory is freed only when their last user releases them.
    `stuck` weights could not be written to the next tier, so that demoting them loses them.
    """

    model: ModelId
    bytes: int
    held: bool
    stuck: bool
    used_s: float
    rate_per_s: float
    reload_s: float


@dataclass(frozen=True, slots=True)
class Demotion:
    """The weights that must leave a tier: `victims` are the first of `candidates`, in order.

    `candidates` names at most `MOST_CANDIDATES` of the weights that stay.
    """

    decided_s: float
    rule: str
    short_bytes: int
    victims: tuple[ModelId, ...]
    candidates: tuple[DemotionCandidate, ...]


MOST_CANDIDATES = 16
