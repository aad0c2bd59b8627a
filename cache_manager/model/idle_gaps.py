"""How long a model was idle between its uses, as counts that fade with their number."""

from collections.abc import Iterator
from math import log2

# Gaps are counted by powers of the square root of two, from a millisecond to about twelve days.
_LEAST_S, _STEPS_AN_OCTAVE, _BUCKETS = 1e-3, 2, 60
# Each new gap makes the earlier ones count less by this factor.
_FADES = 0.97


class IdleGaps:
    """The gaps of one model; a gap is the time from the end of its last use to the next one."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self.total = 0.0

    def saw(self, gap_s: float) -> None:
        """The model was idle for this long."""
        place = 0
        if gap_s > _LEAST_S:
            place = min(_BUCKETS - 1, int(_STEPS_AN_OCTAVE * log2(gap_s / _LEAST_S)) + 1)
        for other in self._counts:
            self._counts[other] *= _FADES
        self._counts[place] = self._counts.get(place, 0.0) + 1.0
        self.total = self.total * _FADES + 1.0

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Pairs of a gap that none of its kind exceeds, and how much it counts; shortest first."""
        for place in sorted(self._counts):
            yield _LEAST_S * 2 ** (place / _STEPS_AN_OCTAVE), self._counts[place]
