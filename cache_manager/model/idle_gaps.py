"""How long a model was idle between its uses, as counts that fade with their number."""

from collections.abc import Iterator
from math import log2

# Gaps are counted in eighths of an octave, from a millisecond to about twelve days.
_LEAST_S, _STEPS_AN_OCTAVE, _BUCKETS = 1e-3, 8, 240
# Each new gap makes the earlier ones count less by this factor.
_FADES = 0.97
# Counts smaller than this are forgotten, so that no model has many of them.
_FORGOTTEN = 0.02


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
        kept = {other: count * _FADES for other, count in self._counts.items()}
        kept[place] = kept.get(place, 0.0) + 1.0
        self._counts = {other: count for other, count in kept.items() if count >= _FORGOTTEN}
        self.total = sum(self._counts.values())

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Pairs of a gap that none of its kind exceeds, and how much it counts; shortest first."""
        for place in sorted(self._counts):
            yield _LEAST_S * 2 ** (place / _STEPS_AN_OCTAVE), self._counts[place]
