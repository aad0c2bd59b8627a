"""How many times as long a model's run takes beside others, learned from runs that happened."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler.estimates.interference.resource_metrics import METRICS, Metrics
from scheduler.estimates.interference.ridge_regression import RidgeRegression

# What a model costs its neighbours is not learned from fewer runs than this.
LEAST_OBSERVED = 8
# Predictions stay between these: a run beside another is hardly faster, and rarely this slow.
LEAST, MOST = 0.9, 8.0
# Predictions are of use if their mean square error is at most this part of that of the belief that
# nothing slows anything down.
_WORTH = 0.5
_RIDGE = 1e-3


class Fit(NamedTuple):
    """How good the predictions are: over how many runs, and the errors of each when left out."""

    observed: int
    left_out_mse: float | None
    mean_slowdown: float


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
        self._rows: list[tuple[Metrics, Metrics, float]] = []
        self._regression = self._anew()
        self._sum = 0.0

    def observe(self, own: Metrics, neighbours: Sequence[Metrics], slowdown: float) -> None:
        """A run took `slowdown` times as long as alone while these ran beside it."""
        if not 0.0 < slowdown < float("inf"):
            return
        beside = _together(neighbours)
        self._rows.append((own, beside, slowdown))
        self._sum += slowdown
        if len(self._rows) > self._window:
            self._sum -= self._rows.pop(0)[2]
        if self._grew((own, beside)):
            self._regression = self._anew()
            for seen_own, seen_beside, seen in self._rows:
                self._regression.observe(self._row(seen_own, seen_beside), seen)
        else:
            self._regression.observe(self._row(own, beside), slowdown)

    def predict(self, own: Metrics, neighbours: Sequence[Metrics]) -> float:
        """How many times as long a run takes beside these; 1 while too little is known."""
        if not neighbours or len(self._regression) < LEAST_OBSERVED:
            return 1.0
        found = self._regression.predict(self._row(own, _together(neighbours)))
        return min(MOST, max(LEAST, found))

    def fit(self) -> Fit:
        """How good the predictions are."""
        observed = len(self._rows)
        mean = self._sum / observed if observed else 1.0
        return Fit(observed, self._regression.left_out_mse(), mean)

    def is_of_use(self) -> bool:
        """Whether predictions are much better than to expect no slowdown; costs a look at all."""
        error = self._regression.left_out_mse()
        if error is None or len(self._rows) < LEAST_OBSERVED:
            return False
        ignored = sum((seen - 1.0) ** 2 for _, _, seen in self._rows) / len(self._rows)
        return error <= _WORTH * ignored

    def _anew(self) -> RidgeRegression:
        inputs = 1 + 3 * len(METRICS)
        return RidgeRegression(inputs, ridge=_RIDGE, window=self._window)

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
    """What several neighbours use together."""
    return tuple([sum(values) for values in zip(*neighbours, strict=True)])
