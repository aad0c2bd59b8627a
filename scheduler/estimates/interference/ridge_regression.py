"""Linear least squares with a ridge, fitted one observation at a time over a sliding window."""

from collections import deque
from collections.abc import Iterator, Sequence

Row = tuple[float, ...]


class RidgeRegression:
    """Weights that minimise the squared errors of the latest observations and `ridge` times theirs.

    The inverse of the normal matrix is kept, so that an observation costs the square of the number
    of inputs. Rounding adds up over updates: after as many as the window holds, it is made anew.
    """

    def __init__(self, inputs: int, *, ridge: float = 1e-3, window: int = 1024) -> None:
        if inputs < 1 or window < 1 or not ridge > 0:
            raise ValueError("a regression needs inputs, a window and a positive ridge")
        self._ridge = ridge
        self._window = window
        self._seen: deque[tuple[Row, float]] = deque()
        self._inverse: list[list[float]] = []
        self._moments: list[float] = []
        self._weights: list[float] | None = None
        self._updates = 0
        self._inputs = inputs
        self._begin()

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def weights(self) -> Sequence[float]:
        """The fitted weights, one for each input."""
        if self._weights is None:
            self._weights = [_dot(row, self._moments) for row in self._inverse]
        return self._weights

    def observe(self, row: Row, value: float) -> None:
        """Count an observation; beyond the window the oldest one is forgotten."""
        if len(row) != self._inputs:
            raise ValueError(f"a row of {self._inputs} inputs, not {len(row)}")
        self._seen.append((row, value))
        self._count(row, value, +1.0)
        if len(self._seen) > self._window:
            self._count(*self._seen.popleft(), -1.0)
            self._updates += 1
            if self._updates >= self._window:
                self._begin()
                for seen in self._seen:
                    self._count(*seen, +1.0)

    def predict(self, row: Row) -> float:
        """The value that the weights give for these inputs."""
        return _dot(self.weights, row)

    def left_out_errors(self) -> Iterator[float]:
        """For each observation, its error under the weights that all others alone would give.

        By the leverage h of an observation its error e becomes e / (1 - h) when it is left out.
        """
        for row, value in self._seen:
            leverage = _dot(row, [_dot(each, row) for each in self._inverse])
            yield (value - self.predict(row)) / (1.0 - leverage)

    def left_out_mse(self) -> float | None:
        """The mean square of these errors; None with nothing, or with one that has no others."""
        if len(self._seen) <= 1:
            return None
        return sum(error * error for error in self.left_out_errors()) / len(self._seen)

    def _begin(self) -> None:
        size = range(self._inputs)
        self._inverse = [[1.0 / self._ridge if i == j else 0.0 for j in size] for i in size]
        self._moments = [0.0 for _ in size]
        self._updates = 0
        self._weights = None

    def _count(self, row: Row, value: float, sign: float) -> None:
        """Add or take away one observation (Sherman and Morrison)."""
        spread = [_dot(each, row) for each in self._inverse]
        scale = sign / (1.0 + sign * _dot(row, spread))
        for line, left in zip(self._inverse, spread, strict=True):
            factor = scale * left
            if factor:
                for column, right in enumerate(spread):
                    line[column] -= factor * right
        for place, each in enumerate(row):
            self._moments[place] += sign * value * each
        self._weights = None


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total = 0.0
    for one, other in zip(left, right, strict=True):
        total += one * other
    return total
