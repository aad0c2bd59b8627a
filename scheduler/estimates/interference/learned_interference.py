"""Slowdowns learned on each type of GPU, and whether what was learned is good enough to use."""

from collections.abc import Sequence

from scheduler.estimates.interference.resource_metrics import Metrics
from scheduler.estimates.interference.slowdowns import MOST, Fit, Slowdowns

# Types of GPUs beyond these are not learned about.
_MOST_TYPES = 16
# Runs that one regression is fitted to: it is made anew at times, of all of them.
_WINDOW = 256
# How good the predictions are is looked at after so many further runs.
_REVIEW = 8


class Interference:
    """What runs beside others taught, by the type of their GPU.

    Predictions are used only while they are better than to expect that nothing slows anything
    down: their errors on left-out runs are compared.
    """

    def __init__(self) -> None:
        self._learned: dict[str, Slowdowns] = {}
        self._trusted: dict[str, bool] = {}
        self._seen: dict[str, int] = {}

    def observe(
        self, gpu_type: str, own: Metrics, neighbours: Sequence[Metrics], slowdown: float
    ) -> None:
        """A run took so many times as long as alone; one beyond all bounds is not counted."""
        if slowdown > MOST:
            return  # it waited for something else
        learned = self._learned.get(gpu_type)
        if learned is None:
            if len(self._learned) >= _MOST_TYPES:
                return
            learned = self._learned[gpu_type] = Slowdowns(window=_WINDOW)
        learned.observe(own, neighbours, slowdown)
        seen = self._seen[gpu_type] = self._seen.get(gpu_type, 0) + 1
        if seen % _REVIEW == 0:
            self._trusted[gpu_type] = learned.is_of_use()

    def slowdown(self, gpu_type: str, own: Metrics, neighbours: Sequence[Metrics]) -> float:
        """How many times as long a run should take beside these; 1 while that is not known."""
        if not neighbours or not self._trusted.get(gpu_type, False):
            return 1.0
        return self._learned[gpu_type].predict(own, neighbours)

    def fit(self, gpu_type: str) -> Fit | None:
        """How good the predictions are there; None before the first run beside another."""
        learned = self._learned.get(gpu_type)
        return None if learned is None else learned.fit()
