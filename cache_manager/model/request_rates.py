"""How often each model was requested lately, and how long it was idle between its uses."""

from collections.abc import Iterable, Iterator
from math import exp, isfinite, log2

from cache_manager.model.ids import ModelId

# Requests count less with age: by the factor e after this many seconds.
DEMAND_SPAN_S = 60.0
_FADED_AFTER_SPANS = 10


class RequestRates:
    """Requests a second for each model."""

    def __init__(self) -> None:
        self._amounts: dict[ModelId, tuple[float, float]] = {}

    def count_request(self, model: ModelId, now: float) -> None:
        amount, at_s = self._amounts.get(model, (0.0, now))
        if at_s != now:
            amount *= exp((at_s - now) / DEMAND_SPAN_S)
        self._amounts[model] = (amount + 1.0, now)

    def rate(self, model: ModelId, now: float) -> float:
        amount, at_s = self._amounts.get(model, (0.0, now))
        return amount * exp((at_s - now) / DEMAND_SPAN_S) / DEMAND_SPAN_S

    def forget(self, model: ModelId) -> None:
        self._amounts.pop(model, None)

    def __len__(self) -> int:
        return len(self._amounts)

    def forget_faded(self, now: float) -> None:
        """Drop the models whose requests are so old that they hardly count any more."""
        faded_before_s = now - _FADED_AFTER_SPANS * DEMAND_SPAN_S
        self._amounts = {
            model: found for model, found in self._amounts.items() if found[1] > faded_before_s
        }


# Gaps are counted by powers of the square root of two, from a millisecond to about twelve days.
_LEAST_S, _STEPS_AN_OCTAVE, _BUCKETS = 1e-3, 2, 60
# Each new gap makes the earlier ones count less by this factor.
_FADES = 0.97
_MOST_COUNTED = 1.0 / (1.0 - _FADES) + 1.0


class IdleGaps:
    """The gaps of one model; a gap is the time from the end of its last use to the next one."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self.total = 0.0

    @classmethod
    def of(cls, counts: Iterable[tuple[int, float]]) -> "IdleGaps":
        """Gaps as `counts` had them; ValueError if no gaps can have such counts."""
        gaps = cls()
        for place, count in counts:
            if not (0 <= place < _BUCKETS and isfinite(count) and 0.0 < count <= _MOST_COUNTED):
                raise ValueError(f"a gap of kind {place} does not count {count} times")
            gaps._counts[place] = count
        gaps.total = sum(gaps._counts.values())
        return gaps

    @property
    def counts(self) -> list[tuple[int, float]]:
        """Each kind of gap and how much it counts, to be kept."""
        return sorted(self._counts.items())

    def saw(self, gap_s: float) -> None:
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
