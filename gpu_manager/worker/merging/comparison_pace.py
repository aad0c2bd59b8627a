"""When groups are compared with single calls, and which calls of a group: all others wait for it.

Each size is compared, and each length of a text's first step has sizes of its own. One after the
other, those comparisons held up every stream of a model for seconds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PAUSES = 3.0  # times as long as a comparison took: comparisons have a quarter of the time at most
_MOST_CHECKED = 4  # calls of a group


class ComparisonPace:
    """Says when the next comparison may begin; for whoever has the model's turn."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.pauses = _PAUSES
        self._clock = clock
        self._from_s = 0.0

    def is_due(self) -> bool:
        """Whether a group may be compared now."""
        return self._clock() >= self._from_s

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """A group is compared meanwhile."""
        begun_s = self._clock()
        try:
            yield
        finally:
            end_s = self._clock()
            self._from_s = end_s + self.pauses * (end_s - begun_s)


def checked_places(size: int) -> list[int]:
    """The places of the calls that run both ways, of so many: first, last, and some between."""
    if size <= _MOST_CHECKED:
        return list(range(size))
    return [place * (size - 1) // (_MOST_CHECKED - 1) for place in range(_MOST_CHECKED)]
