"""Percentiles of the last minute in little room: counts in narrow ranges, a few seconds each."""

from collections import Counter, deque
from collections.abc import Sequence
from math import exp, log

_SLICE_S = 5.0
_SLICES = 12
_LEAST_S = 1e-5
_WIDTH = log(1.02)  # of a range: a percentile is off by one hundredth at most


class Percentiles:
    """Durations of the last minute, or of a shorter time before now."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, Counter[int]]] = deque(maxlen=_SLICES + 1)

    def add(self, seconds: float, at_s: float) -> None:
        """Add a duration that ended at this time."""
        number = int(at_s // _SLICE_S)
        slices = self._slices
        if not slices or slices[-1][0] < number:
            slices.append((number, Counter()))
        slices[-1][1][round(log(max(seconds, _LEAST_S)) / _WIDTH)] += 1

    def of(self, shares: Sequence[float], now_s: float, last_s: float) -> list[float | None]:
        """For each share, the duration that this share did not exceed; None without durations."""
        first = int((now_s - last_s) // _SLICE_S)
        counts: Counter[int] = Counter()
        for number, found in self._slices:
            if number >= first:
                counts.update(found)
        total = counts.total()
        if not total:
            return [None] * len(shares)
        return [_at(counts, share * total) for share in shares]


def _at(counts: Counter[int], rank: float) -> float:
    passed = 0
    place = 0
    for place in sorted(counts):
        passed += counts[place]
        if passed >= rank:
            break
    return round(exp(place * _WIDTH), 6)
