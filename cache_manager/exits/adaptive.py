"""Each model by its own gaps between uses: it stays while its memory costs less than its load.

`adaptive:WORTH,HOST,DISK`: WORTH is what a second of loading is worth, in GiB-seconds of GPU
memory; HOST and DISK are the prices of a byte of host memory and of disk, as shares of the price
of a byte of GPU memory. With the usual ones (200, 0.5, 0.001) it needs less GPU memory, host memory
and waiting than 30 s a stage over the ten windows of docs/evaluation/sage.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from cache_manager.exits.exit_rule import IdleModel
from cache_manager.model.ids import MIB, Tier
from cache_manager.model.request_rates import IdleGaps

_GIB = 1024 * MIB
_STAGES = tuple(Tier)
_GONE = _STAGES.index(Tier.ABSENT)
# A model that was used only once stays as long as SAGE lets every model stay.
_UNKNOWN_S = 30.0
# Gaps that nobody has seen yet: one in each octave, which together count as much as one seen.
_IMAGINED_S = tuple(2.0**octave for octave in range(15))
_IMAGINED_WEIGHT = 1.0 / len(_IMAGINED_S)
_MOST_PARAMETERS = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """The worth of a second of loading, and what memory costs below the GPU."""

    worth_gib_s: float = 200.0
    host_price: float = 0.5
    disk_price: float = 0.001

    @classmethod
    def of(cls, parameters: Sequence[float]) -> "Rule":
        if len(parameters) > _MOST_PARAMETERS:
            raise ValueError("it takes three numbers at most: worth, host price, disk price")
        if not all(isfinite(number) and number >= 0.0 for number in parameters):
            raise ValueError("its parameters are finite numbers, 0 or more")
        return cls(*parameters)

    def stays_s(self, stage: Tier, idle: IdleModel) -> float | None:
        if stage is Tier.ABSENT:
            return None
        if not idle.gaps.total:
            return _UNKNOWN_S
        leaves = self._leaves_s(idle)
        entered_s = leaves[stage - 1] if stage is not Tier.GPU else 0.0
        return leaves[stage] - entered_s

    def _leaves_s(self, idle: IdleModel) -> list[float]:
        """When the model leaves each stage, counted from its last use."""
        gaps = list(_expected(idle.gaps))
        waits = [self.worth_gib_s * idle.reload_s(stage) for stage in _STAGES]
        best = _cheapest_stages(gaps, self._rates(idle), waits)
        leaves, stage, since_s = [0.0] * _GONE, 0, 0.0
        for (gap_s, _), choice in zip(gaps, best, strict=True):
            for left in range(stage, choice[stage]):
                leaves[left] = since_s
            stage, since_s = choice[stage], gap_s
        for left in range(stage, _GONE):
            leaves[left] = since_s
        return leaves

    def _rates(self, idle: IdleModel) -> list[float]:
        """What a second in each stage costs, in GiB-seconds of GPU memory."""
        gpu, context, host, disk = (idle.held_bytes(stage) / _GIB for stage in _STAGES[:_GONE])
        in_host = self.host_price * host
        return [gpu, context + in_host, in_host, self.disk_price * disk, 0.0]


def _expected(gaps: IdleGaps) -> Iterator[tuple[float, float]]:
    """The gaps that were seen and those that may come, shortest first, with their weights."""
    imagined = iter(_IMAGINED_S)
    next_s = next(imagined, None)
    for gap_s, weight in gaps:
        while next_s is not None and next_s <= gap_s:
            yield next_s, _IMAGINED_WEIGHT
            next_s = next(imagined, None)
        yield gap_s, weight
    while next_s is not None:
        yield next_s, _IMAGINED_WEIGHT
        next_s = next(imagined, None)


def _cheapest_stages(
    gaps: Sequence[tuple[float, float]], rates: Sequence[float], waits: Sequence[float]
) -> list[list[int]]:
    """For each gap, and each stage in which it begins to be waited for: the stage to wait in.

    From the longest gap to the shortest: to wait for a gap costs memory for all that are as long
    or longer, then a load for this one, then what is cheapest for the longer ones.
    """
    later = [0.0] * len(rates)
    longer = 0.0
    stages: list[list[int]] = []
    for place in range(len(gaps) - 1, -1, -1):
        gap_s, weight = gaps[place]
        longer += weight
        held = longer * (gap_s - (gaps[place - 1][0] if place else 0.0))
        cheapest, chosen = [0.0] * len(rates), [0] * len(rates)
        least, least_stage = float("inf"), 0
        for stage in range(len(rates) - 1, -1, -1):
            cost = held * rates[stage] + weight * waits[stage] + later[stage]
            if cost < least:
                least, least_stage = cost, stage
            cheapest[stage], chosen[stage] = least, least_stage
        later = cheapest
        stages.append(chosen)
    stages.reverse()
    return stages
