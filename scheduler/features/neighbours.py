"""Neighbours: what runs at once on one GPU do to each other, learned for each type of GPU."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.core.layer import Layer
from scheduler.core.lifecycle import Lifecycle
from scheduler.model.events import RunFinished
from scheduler.model.values import METRICS, CoreSettings, SlotId

# A run is reported with others, so long after its end at most.
_REPORTED_S = 0.1
# A run counts as one alone if others ran for no more than this part of its time, and as one
# beside them if they ran for at least that part; those between teach nothing.
_ALONE, _BESIDE = 0.05, 0.5
# Runs of the same models beside the same ones make one observation at first, and then one for each
# such time, which doubles up to a bound: none of the others should be forgotten for them.
_SPACING_S, _MOST_SPACING_S = 0.1, 30.0
_MOST_PAIRS = 4_096
# Types of GPUs beyond these are not learned about.
_MOST_TYPES = 16
# Runs that one regression is fitted to.
_WINDOW = 256
# What a run's time is compared with may have ended before it: so many leases of each slot.
_MOST_ENDED = 64

Metrics = tuple[float, ...]  # one number for each of METRICS


class Neighbours(Layer):
    """Learns from runs that had neighbours, on slots whose leases run at once, by type of GPU.

    Predictions are used only while they are better than to expect that nothing slows anything
    down: their errors on left-out runs are compared.
    """

    def __init__(self, lifecycle: Lifecycle, settings: CoreSettings) -> None:
        self.learned: dict[str, Slowdowns] = {}
        self._cluster = lifecycle.cluster
        self._pairs: dict[tuple[ModelId, ...], _PairRuns] = {}
        self._ended: dict[SlotId, deque[_EndedRun]] = {}
        self._cluster.profiles.predict_slowdowns(self.slowdown)
        lifecycle.switch_on(self)

    def ended(self, lease: ActiveLease) -> None:
        slot = lease.slot
        if not slot.at_once or lease.beside:
            return
        if slot.id not in self._ended:
            slots = self._cluster.slots  # others have left
            self._ended = {name: runs for name, runs in self._ended.items() if name in slots}
            self._ended[slot.id] = deque(maxlen=_MOST_ENDED)
        self._ended[slot.id].append(_EndedRun(lease.models, lease.there_s, self._cluster.now))

    def ran_alone(self, slot: Slot, event: RunFinished) -> bool:
        """If it did not, learn what that taught."""
        if not slot.at_once:
            return True
        parts = self._ran_beside(slot, event.model, event.run_s * event.together)
        if parts is None:
            return False
        share = sum(parts.values())
        if share <= _ALONE:
            return True
        if share >= _BESIDE:
            self._learn(slot, event, parts)
        return False

    def slowdown(
        self, model: ModelId, gpu_type: str, neighbours: Sequence[tuple[ModelId, ...]]
    ) -> float:
        """How many times as long a run of the model should take beside these leases."""
        own, others = self.metrics(model), [self._mean_metrics(models) for models in neighbours]
        measured = [metrics for metrics in others if metrics is not None]
        if own is None or len(measured) < len(others):
            return 1.0
        return self.predict(gpu_type, own, measured)

    def predict(self, gpu_type: str, own: Metrics, neighbours: Sequence[Metrics]) -> float:
        """How many times as long a run should take beside these; 1 while that is not known."""
        learned = self.learned.get(gpu_type)
        if learned is None or not learned.is_of_use:
            return 1.0
        return learned.predict(own, neighbours)

    def observe(
        self, gpu_type: str, own: Metrics, neighbours: Sequence[Metrics], slowdown: float
    ) -> None:
        """A run took so many times as long as alone; one beyond all bounds is not counted."""
        if slowdown > MOST:
            return  # it waited for something else
        if gpu_type not in self.learned:
            if len(self.learned) >= _MOST_TYPES:
                return
            self.learned[gpu_type] = Slowdowns()
        self.learned[gpu_type].observe(own, neighbours, slowdown)

    def metrics(self, model: ModelId) -> Metrics | None:
        """What the model uses of a GPU; None if that was not measured."""
        profile = self._cluster.profiles.known.get(model)
        return metrics_of(profile.features) if profile is not None and profile.features else None

    def _mean_metrics(self, models: tuple[ModelId, ...]) -> Metrics | None:
        """What these models use that run one after the other; None if one was not measured."""
        measured = [metrics for model in models if (metrics := self.metrics(model)) is not None]
        return mean_of(measured) if measured and len(measured) == len(models) else None

    def _ran_beside(
        self, slot: Slot, model: ModelId, whole_s: float
    ) -> dict[tuple[ModelId, ...], float] | None:
        """What ran beside a run that has just been reported, and for which part of its time.

        None if its lease is not known. Leases of the same model are left out: its calls take turns.
        """
        now = self._cluster.now
        leases = slot.leases.values()
        running = [lease for lease in leases if model in lease.models and not lease.beside]
        if not running:
            return None
        own = min(running, key=lambda lease: lease.there_s)
        begun_s = max(own.there_s, now - whole_s - _REPORTED_S)
        span_s = now - begun_s
        if span_s <= 0.0:
            return None
        parts: dict[tuple[ModelId, ...], float] = {}
        for lease in leases:
            runs = not (lease is own or lease.beside or lease.loading)
            if runs and model not in lease.models:
                _add(parts, lease.models, (now - max(begun_s, lease.there_s)) / span_s)
        for ended in self._ended.get(slot.id, ()):
            if model not in ended.models:
                both_s = ended.ended_s - max(begun_s, ended.begun_s)
                _add(parts, ended.models, both_s / span_s)
        return parts

    def _learn(
        self, slot: Slot, event: RunFinished, parts: dict[tuple[ModelId, ...], float]
    ) -> None:
        profiles, gpu_type = self._cluster.profiles, slot.gpu.spec.gpu_type
        alone_s = profiles.alone_s(event.model, event.batch * event.together, gpu_type)
        own = self.metrics(event.model)
        if not alone_s or own is None:
            return
        neighbours: list[Metrics] = []
        for models, part in parts.items():
            metrics = self._mean_metrics(models)
            if metrics is None:
                return
            neighbours.append(scaled(metrics, part))
        slowed = event.run_s * event.together / alone_s
        mean = self._pair(event.model, parts).mean_when_due(slowed, self._cluster.now)
        if mean is not None:
            self.observe(gpu_type, own, neighbours, mean)

    def _pair(self, model: ModelId, parts: dict[tuple[ModelId, ...], float]) -> "_PairRuns":
        name = (model, *sorted([other for models in parts for other in models]))
        pair = self._pairs.get(name)
        if pair is None:
            if len(self._pairs) >= _MOST_PAIRS:
                self._pairs.clear()
            pair = self._pairs[name] = _PairRuns()
        return pair


def _add(parts: dict[tuple[ModelId, ...], float], models: tuple[ModelId, ...], part: float) -> None:
    if part > 0.0:
        parts[models] = parts.get(models, 0.0) + part


class _EndedRun(NamedTuple):
    """What a lease that has ended had on its slot, and when."""

    models: tuple[ModelId, ...]
    begun_s: float
    ended_s: float


class _PairRuns:
    """Runs since the last observation of a pair, and when the next one is due."""

    def __init__(self) -> None:
        self.next_s = 0.0
        self.spacing_s = _SPACING_S
        self.total = 0.0
        self.number = 0

    def mean_when_due(self, slowdown: float, now: float) -> float | None:
        """Count a run; the mean of those that were counted, if it is time for an observation."""
        self.total += slowdown
        self.number += 1
        if now < self.next_s:
            return None
        mean = self.total / self.number
        self.total, self.number = 0.0, 0
        self.next_s = now + self.spacing_s
        self.spacing_s = min(_MOST_SPACING_S, 2.0 * self.spacing_s)
        return mean


def metrics_of(features: Mapping[str, float]) -> Metrics | None:
    """A profile's metrics in their order; None unless all are there, finite and not negative."""
    metrics = tuple([features.get(name, -1.0) for name in METRICS])
    return metrics if all(isfinite(value) and value >= 0 for value in metrics) else None


def scaled(metrics: Metrics, part: float) -> Metrics:
    """The metrics of what runs for a part of the time."""
    return tuple([part * value for value in metrics])


def mean_of(several: Sequence[Metrics]) -> Metrics:
    """The metrics of models that run one after the other, each as long."""
    if len(several) == 1:
        return several[0]
    return tuple([sum(values) / len(several) for values in zip(*several, strict=True)])


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
    """Weights that minimise the squared errors of what was observed, and `_RIDGE` of their own.

    The inverse of the normal matrix is kept, so that an observation costs the square of the number
    of inputs.
    """

    def __init__(self, inputs: int) -> None:
        size = range(inputs)
        self._inverse = [[1.0 / _RIDGE if i == j else 0.0 for j in size] for i in size]
        self._moments = [0.0 for _ in size]
        self._weights: list[float] | None = None

    @property
    def weights(self) -> Sequence[float]:
        if self._weights is None:
            self._weights = [_dot(row, self._moments) for row in self._inverse]
        return self._weights

    def observe(self, row: Row, value: float, sign: float = +1.0) -> None:
        """Add one observation, or with -1.0 take it away (Sherman and Morrison)."""
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

    def predict(self, row: Row) -> float:
        return _dot(self.weights, row)

    def left_out_error(self, row: Row, value: float) -> float:
        """The error of an observation under the weights that all others alone would give.

        By the leverage h of an observation its error e becomes e / (1 - h) when it is left out.
        """
        leverage = _dot(row, [_dot(each, row) for each in self._inverse])
        return (value - self.predict(row)) / (1.0 - leverage)


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
    begins anew with the rows that are kept. So it does when as many were taken away as the window
    holds, since rounding adds up.
    """

    def __init__(self, *, window: int = _WINDOW) -> None:
        self.rows: deque[tuple[Metrics, Metrics, float]] = deque()
        self._window = window
        self._largest = [0.0 for _ in METRICS]
        self._observed = 0
        self.is_of_use = False  # predictions are much better than to expect no slowdown
        self._begin()

    def observe(self, own: Metrics, neighbours: Sequence[Metrics], slowdown: float) -> None:
        """A run took `slowdown` times as long as alone while these ran beside it."""
        if not 0.0 < slowdown < float("inf"):
            return
        beside = _together(neighbours)
        self.rows.append((own, beside, slowdown))
        grew = self._grew((own, beside))
        if not grew:
            self._regression.observe(self._row(own, beside), slowdown)
        if len(self.rows) > self._window:
            seen_own, seen_beside, seen = self.rows.popleft()
            if not grew:
                self._regression.observe(self._row(seen_own, seen_beside), seen, -1.0)
                self._taken_away += 1
        if grew or self._taken_away >= self._window:
            self._begin()
        self._observed += 1
        if self._observed % _REVIEW == 0:  # it costs a look at all
            self.is_of_use = self._review()

    def predict(self, own: Metrics, neighbours: Sequence[Metrics]) -> float:
        """How many times as long a run takes beside these; 1 while too little is known."""
        if not neighbours or len(self.rows) < LEAST_OBSERVED:
            return 1.0
        slowdown = self._regression.predict(self._row(own, _together(neighbours)))
        return min(MOST, max(LEAST, slowdown))

    def left_out_mse(self) -> float | None:
        """The mean square of the errors of left-out runs; None with one that has no others."""
        if len(self.rows) <= 1:
            return None
        total = 0.0
        for own, beside, seen in self.rows:
            total += self._regression.left_out_error(self._row(own, beside), seen) ** 2
        return total / len(self.rows)

    def _review(self) -> bool:
        error = self.left_out_mse()
        if error is None or len(self.rows) < LEAST_OBSERVED:
            return False
        ignored = sum((seen - 1.0) ** 2 for _, _, seen in self.rows) / len(self.rows)
        return error <= _WORTH * ignored

    def _begin(self) -> None:
        self._regression = RidgeRegression(1 + 3 * len(METRICS))
        self._taken_away = 0
        for own, beside, seen in self.rows:
            self._regression.observe(self._row(own, beside), seen)

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
