"""What was expected of loads and runs, until reports say what they took."""

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.events import LoadFailed, ModelLoaded, RunFinished
from scheduler.model.values import SlotId
from scheduler.service.metrics.counters import SchedulerCounters

# Runs are reported a moment after their lease has ended: other models may have come to the slot.
_MODELS_OF_SLOT = 8


class ExpectedTimes:
    """Estimates of leases of one model: where there are more, nobody says which one erred."""

    def __init__(self, meters: SchedulerCounters) -> None:
        self._meters = meters
        self._loads: dict[tuple[GpuId, ModelId], float] = {}
        self._runs: dict[SlotId, dict[ModelId, float]] = {}
        self._loading = False

    def prepared(self, action: Prepare) -> None:
        """What is loaded for a request, whose dispatch follows at once."""
        self._loading = not action.prefetch

    def dispatched(self, action: Dispatch) -> None:
        """A new lease, with its estimates."""
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
        """It has come."""
        expected_s = self._loads.pop((event.gpu, event.model), None)
        if expected_s is not None:
            model = self._meters.models.of(event.model)
            self._meters.compared("load", model, expected_s, event.load_s)

    def failed(self, event: LoadFailed) -> None:
        """It does not come."""
        self._loads.pop((event.gpu, event.model), None)

    def ran(self, event: RunFinished) -> None:
        """Calls have ended, which took that long each."""
        expected_s = self._runs.get(event.slot, _NOTHING).get(event.model)
        if expected_s is not None:
            model = self._meters.models.of(event.model)
            self._meters.compared("run", model, expected_s, event.run_s)

    def forget(self) -> None:
        """GPUs came or went: what was expected before may never be reported."""
        self._loads.clear()
        self._runs.clear()


_NOTHING: dict[ModelId, float] = {}
