"""How many times as long a model's run takes beside others, learned for each type of GPU."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from scheduler.estimates.resource_metrics import METRICS, Metrics

# What a model costs its neighbours is not learned from fewer runs than this.
LEAST_OBSERVED = 8
# Predictions stay between these: a run beside another is hardly faster, and rarely this slow.
LEAST, MOST = 0.9, 8.0
# Predictions are of use if their mean square error is at most this part of that of the belief that
# nothing slows anything down.
_WORTH = 0.5
# How good the predictions are is looked at after so many further runs.
_REVIEW = 8
_RIDGE = 1e-3


Row = tuple[float, ...]


class RidgeRegression:
    """Weights that minimise the squared errors of the latest observations and `_RIDGE` of theirs.

    The inverse of the normal matrix is kept, so that an observation costs the square of the number
    of inputs. Rounding adds up over updates: after as many as the window holds, it is made anew.
    """

    def __init__(self, inputs: int, *, window: int = 1024) -> None:
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
        if self._weights is None:
            self._weights = [_dot(row, self._moments) for row in self._inverse]
        return self._weights

    def observe(self, row: Row, value: float) -> None:
        """Count an observation; beyond the window the oldest one is forgotten."""
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
        self._inverse = [[1.0 / _RIDGE if i == j else 0.0 for j in size] for i in size]
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


class Slowdowns:
    """A linear regression of slowdowns on the metrics of the one that runs and of its neighbours.

    The paper's has these 26 inputs. By such a regression each model disturbs all others alike, and
    the sum over the pairs of a workload is the same however it is paired. Ours has the
    product of each metric of both as well: who uses what the other does not, disturbs it less.

    Metrics are of very different sizes: each counts as a share of the largest that was seen, so
    that one ridge suits all. A new largest one changes what earlier rows mean; the regression then
    begins anew with the rows that are kept.
    """

    def __init__(self, *, window: int = 1024) -> None:
        self._window = window
        self._largest = [0.0 for _ in METRICS]
        self.rows: list[tuple[Metrics, Metrics, float]] = []
        self.regression = self._anew()
        self._observed = 0
        self.is_of_use = False  # predictions are much better than to expect no slowdown

    def observe(self, own: Metrics, neighbours: Sequence[Metrics], slowdown: float) -> None:
        """A run took `slowdown` times as long as alone while these ran beside it."""
        if not 0.0 < slowdown < float("inf"):
            return
        beside = _together(neighbours)
        self.rows.append((own, beside, slowdown))
        if len(self.rows) > self._window:
            self.rows.pop(0)
        if self._grew((own, beside)):
            self.regression = self._anew()
            for seen_own, seen_beside, seen in self.rows:
                self.regression.observe(self._row(seen_own, seen_beside), seen)
        else:
            self.regression.observe(self._row(own, beside), slowdown)
        self._observed += 1
        if self._observed % _REVIEW == 0:  # it costs a look at all
            self.is_of_use = self._review()

    def predict(self, own: Metrics, neighbours: Sequence[Metrics]) -> float:
        """How many times as long a run takes beside these; 1 while too little is known."""
        if not neighbours or len(self.regression) < LEAST_OBSERVED:
            return 1.0
        slowdown = self.regression.predict(self._row(own, _together(neighbours)))
        return min(MOST, max(LEAST, slowdown))

    def _review(self) -> bool:
        error = self.regression.left_out_mse()
        if error is None or len(self.rows) < LEAST_OBSERVED:
            return False
        ignored = sum((seen - 1.0) ** 2 for _, _, seen in self.rows) / len(self.rows)
        return error <= _WORTH * ignored

    def _anew(self) -> RidgeRegression:
        return RidgeRegression(1 + 3 * len(METRICS), window=self._window)

    def _grew(self, seen: Iterable[Metrics]) -> bool:
        grew = False
        for metrics in seen:
            for place, value in enumerate(metrics):
                if value > self._largest[place]:
                    # Twice as far as needed: so that a slow rise is not a new beginning each time.
                    self._largest[place] = 2.0 * value
                    grew = True
        return grew

    def _row(self, own: Metrics, beside: Metrics) -> tuple[float, ...]:
        mine, theirs = self._shares(own), self._shares(beside)
        both = [one * other for one, other in zip(mine, theirs, strict=True)]
        return (1.0, *mine, *theirs, *both)

    def _shares(self, metrics: Metrics) -> list[float]:
        return [
            value / largest if largest else 0.0
            for value, largest in zip(metrics, self._largest, strict=True)
        ]


def _together(neighbours: Sequence[Metrics]) -> Metrics:
    return tuple([sum(values) for values in zip(*neighbours, strict=True)])


# Types of GPUs beyond these are not learned about.
_MOST_TYPES = 16
# Runs that one regression is fitted to: it is made anew at times, of all of them.
_WINDOW = 256


class Interference:
    """What runs beside others taught, by the type of their GPU.

    Predictions are used only while they are better than to expect that nothing slows anything
    down: their errors on left-out runs are compared.
    """

    def __init__(self) -> None:
        self.learned: dict[str, Slowdowns] = {}

    def observe(
        self, gpu_type: str, own: Metrics, neighbours: Sequence[Metrics], slowdown: float
    ) -> None:
        """A run took so many times as long as alone; one beyond all bounds is not counted."""
        if slowdown > MOST:
            return  # it waited for something else
        learned = self.learned.get(gpu_type)
        if learned is None:
            if len(self.learned) >= _MOST_TYPES:
                return
            learned = self.learned[gpu_type] = Slowdowns(window=_WINDOW)
        learned.observe(own, neighbours, slowdown)

    def slowdown(self, gpu_type: str, own: Metrics, neighbours: Sequence[Metrics]) -> float:
        """How many times as long a run should take beside these; 1 while that is not known."""
        learned = self.learned.get(gpu_type)
        if learned is None or not learned.is_of_use:
            return 1.0
        return learned.predict(own, neighbours)
