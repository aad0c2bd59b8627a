"""Estimated loads and runs, kept until reports bring the measured times."""

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.events import LoadFailed, ModelLoaded, RunFinished
from scheduler.model.values import SlotId
from scheduler.service.metrics.counters import SchedulerCounters

# Runs are reported after their lease has ended: the slot may serve other models by then.
_MODELS_OF_SLOT = 8


class ExpectedTimes:
    """Estimates of leases of one model: with several models an error belongs to none of them."""

    def __init__(self, meters: SchedulerCounters) -> None:
        self._meters = meters
        self._loads: dict[tuple[GpuId, ModelId], float] = {}
        self._runs: dict[SlotId, dict[ModelId, float]] = {}
        self._loading = False

    def prepared(self, action: Prepare) -> None:
        """Note the loads of a lease, whose dispatch follows at once."""
        self._loading = not action.prefetch

    def dispatched(self, action: Dispatch) -> None:
        """Note a new lease with its estimates."""
        loading, self._loading = self._loading, False
        if len(action.models) != 1:
            return
        (model,) = action.models
        if loading:
            self._loads[action.gpu, model] = action.estimate.load_s
        runs = self._runs.setdefault(action.slot, {})
        runs.pop(model, None)
        runs[model] = action.estimate.run_s
        if len(runs) > _MODELS_OF_SLOT:
            del runs[next(iter(runs))]

    def loaded(self, event: ModelLoaded) -> None:
        """Compare the load with its estimate."""
        expected_s = self._loads.pop((event.gpu, event.model), None)
        if expected_s is not None:
            model = self._meters.models.of(event.model)
            self._meters.compared("load", model, expected_s, event.load_s)

    def failed(self, event: LoadFailed) -> None:
        """Drop the estimate of a load that failed."""
        self._loads.pop((event.gpu, event.model), None)

    def ran(self, event: RunFinished) -> None:
        """Compare calls that have ended, and their measured seconds, with the estimate."""
        expected_s = self._runs.get(event.slot, _NOTHING).get(event.model)
        if expected_s is not None:
            model = self._meters.models.of(event.model)
            self._meters.compared("run", model, expected_s, event.run_s)

    def forget(self) -> None:
        """Drop all estimates: after GPUs joined or left, their reports may never arrive."""
        self._loads.clear()
        self._runs.clear()


_NOTHING: dict[ModelId, float] = {}
