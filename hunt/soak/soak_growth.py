"""Whether a series grows, told from noise, from steps and from the teeth of a saw; pure.

The first half of a series is warming up. The second half is cut into blocks of equal time, and of
each the median counts, so that peaks within a block do not matter. The growth is the median slope
of all pairs of blocks (Theil and Sen), its interval that of Kendall's rank statistic: it asks
nothing of the noise's shape, and a single step, or three teeth of a saw, are within it.

Noise that wanders would look like growth: neighbouring blocks say the same thing twice. How much
they do is seen in what the line leaves (the residuals), and the interval is wider by that.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import NamedTuple

BLOCKS = 20
_HOUR_S = 3600.0
# Two sides of 99.9 %: many series are judged in one run.
_SIGMAS = 3.29
# Growth below this part of the level in an hour is none.
_ALLOWED_SHARE = 0.01
# What could grow by more than this part of its level in an hour, for all that is known, is noisy.
_TELLING_SHARE = 0.25
# Of the second half.
_LEAST_JUDGED_S = 120.0
_MOST_ALIKE = 0.95


class SeriesPoint(NamedTuple):
    """A value at a moment, in seconds since the beginning."""

    at_s: float
    value: float


class SeriesGrowth(NamedTuple):
    """How a series goes, in units an hour; `low_per_h` and `high_per_h` bound its slope.

    It grows if even the lower bound is above zero, and the slope above what is allowed.
    """

    level: float
    per_h: float
    low_per_h: float
    high_per_h: float
    allowed_per_h: float

    @property
    def grows(self) -> bool:
        """Whether it grows, beyond noise and beyond what is allowed."""
        return self.low_per_h > 0.0 and self.per_h > self.allowed_per_h

    @property
    def is_flat(self) -> bool:
        """Whether it is known not to grow by much: the noise is small enough to say so."""
        telling_per_h = max(self.allowed_per_h, _TELLING_SHARE * abs(self.level))
        return not self.grows and self.high_per_h <= telling_per_h


def growth_of(points: Sequence[SeriesPoint], resolution: float) -> SeriesGrowth | None:
    """The growth of the second half; None if that is too short, or lacks samples.

    Less than `resolution` within the second half is not told from none.
    """
    blocks = _blocks(points)
    if blocks is None:
        return None
    slopes = sorted(
        (later.value - earlier.value) / (later.at_s - earlier.at_s) * _HOUR_S
        for place, earlier in enumerate(blocks)
        for later in blocks[place + 1 :]
    )
    per_h = median(slopes)
    low, high = _interval(slopes, len(blocks))
    off_per_h = _wandering(blocks, per_h, resolution)
    low, high = min(low, per_h - off_per_h), max(high, per_h + off_per_h)
    level = median(block.value for block in blocks)
    judged_h = (points[-1].at_s - _middle_s(points)) / _HOUR_S
    allowed_per_h = max(_ALLOWED_SHARE * abs(level), resolution / judged_h)
    return SeriesGrowth(level, per_h, low, high, allowed_per_h)


def _middle_s(points: Sequence[SeriesPoint]) -> float:
    return (points[0].at_s + points[-1].at_s) / 2.0


def _blocks(points: Sequence[SeriesPoint]) -> list[SeriesPoint] | None:
    """The median of each block of the second half; None if one of them would be without samples."""
    if not points or points[-1].at_s - _middle_s(points) < _LEAST_JUDGED_S:
        return None
    middle_s, last_s = _middle_s(points), points[-1].at_s
    width_s = (last_s - middle_s) / BLOCKS
    inside: list[list[float]] = [[] for _ in range(BLOCKS)]
    for at_s, value in points:
        if at_s >= middle_s:
            inside[min(BLOCKS - 1, int((at_s - middle_s) / width_s))].append(value)
    if not all(inside):
        return None
    return [
        SeriesPoint(middle_s + (place + 0.5) * width_s, median(values))
        for place, values in enumerate(inside)
    ]


def _wandering(blocks: Sequence[SeriesPoint], per_h: float, resolution: float) -> float:
    """By how much the slope may be off, if blocks that are neighbours say the same thing twice.

    The correlation of neighbours, corrected for that a line was fitted, is taken for that of a
    process that forgets by the same share at each step: so many blocks say what one independent
    block would. What the line leaves within the resolution is no noise: a value that grows by whole
    pieces leaves that much.
    """
    left = [block.value - per_h / _HOUR_S * block.at_s for block in blocks]
    if max(left) - min(left) <= resolution:
        return 0.0
    count, repetition = len(blocks), _repetition(left)
    independent = max(1.0, count - 1 - repetition)
    spread = pstdev(left) * math.sqrt(repetition * count / independent)
    middle_s = fmean(block.at_s for block in blocks)
    arm_s = math.sqrt(sum((block.at_s - middle_s) ** 2 for block in blocks))
    return _SIGMAS * spread / arm_s * _HOUR_S


def _repetition(left: Sequence[float]) -> float:
    """How many blocks say what one independent block would: 1 for noise without a memory.

    Half of them at most: of a noise that never forgets so few blocks tell nothing.
    """
    ranks, count = _ranks(left), len(left)
    mean = fmean(ranks)
    off = [rank - mean for rank in ranks]
    alike = sum(one * following for one, following in pairwise(off))
    alike /= sum(each * each for each in off)
    if alike <= 0.0:
        return 1.0
    alike = min(_MOST_ALIKE, (alike + 2.0 / count) / (1.0 - 4.0 / count))
    return min(count / 2.0, (1.0 + alike) / (1.0 - alike))


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each value among all; equal values share the mean of their places."""
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order)))}
    last = {value: place for place, value in enumerate(order)}
    return [(first[value] + last[value]) / 2.0 for value in values]


def _interval(slopes: Sequence[float], blocks: int) -> tuple[float, float]:
    """Sen's interval of the median slope: by how far concordant pairs can outnumber others."""
    sigma = math.sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18.0)
    beyond = int((len(slopes) - _SIGMAS * sigma) / 2.0)
    return slopes[beyond], slopes[-1 - beyond]
