"""How long a stage takes, and what it costs, in each configuration."""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from scheduler.model.values import Configuration
from scheduler.workflows.dag import BadProfile

_HOUR_S = 3600.0


class Choice(NamedTuple):
    """A configuration of one stage: its time, and its cost for each request of the batch."""

    time_s: float
    cost: float
    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour of one vCPU and one vGPU costs."""

    vcpu_hour: float
    vgpu_hour: float

    def cost(self, configuration: Configuration, held_s: float) -> float:
        rate = configuration.vcpus * self.vcpu_hour + configuration.vgpus * self.vgpu_hour
        return rate * held_s / _HOUR_S


@dataclass(frozen=True, slots=True)
class StageProfile:
    """All choices for a stage, the fastest first; equally fast ones by cost, then by resources."""

    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise BadProfile("a profile has no configuration")
        for choice in self.choices:
            if not (isfinite(choice.time_s) and choice.time_s > 0.0 and choice.cost >= 0.0):
                raise BadProfile(f"{choice.configuration} has time {choice.time_s}")
            if min(choice.configuration) < 1:
                raise BadProfile(f"{choice.configuration} has a part below 1")
        object.__setattr__(self, "choices", tuple(sorted(self.choices)))

    def up_to(self, batch: int) -> "StageProfile":
        """The choices with at most this batch; BadProfile if there is none."""
        return StageProfile(tuple(c for c in self.choices if c.configuration.batch <= batch))


def profile(times_s: Mapping[Configuration, float], prices: Prices) -> StageProfile:
    return StageProfile(
        tuple(
            Choice(time_s, prices.cost(each, time_s) / max(each.batch, 1), each)
            for each, time_s in times_s.items()
        )
    )


def undominated(choices: Iterable[Choice], many: int = 1) -> list[Choice]:
    """Those to which fewer than `many` others are at once as fast and as cheap, fastest first.

    Of the `many` cheapest ways to do all stages in a given time, none needs another choice.
    """
    kept: list[Choice] = []
    lowest = [inf] * many  # the lowest costs of those kept, ascending
    for choice in sorted(choices):
        if choice.cost < lowest[-1]:
            kept.append(choice)
            insort(lowest, choice.cost)
            lowest.pop()
    return kept
