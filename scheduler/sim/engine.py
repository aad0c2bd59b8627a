"""The core on virtual time: arrivals go in, and placements take no time.

A GPU has two resources, as live: its copy engine loads while its compute runs, where the core
orders a load beside runs. A slot computes for one lease at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from msgspec import structs

from scheduler.model.actions import Action, Demote, Dispatch, EnqueueLocally, Prepare, SetTimer
from scheduler.model.events import (
    Event,
    GpuJoined,
    ModelLoaded,
    ModelRegistered,
    RequestArrived,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import (
    ANY_GPU_TYPE,
    Configuration,
    Explanation,
    ModelSpec,
    Request,
    RequestId,
    SlotId,
)
from scheduler.sim.model_catalogue import BATCH, Hardware, SimModel
from scheduler.sim.simulation_tally import SimulationTally
from scheduler.sim.workload import Workload

_PROGRESS_EVERY = 2_000
_ALONE = (1,)
_BATCHES = (1, 2, 4, 8, 16)

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class SimulationRun:
    """The results of one simulation."""

    tally: SimulationTally
    explanations: list[Explanation] = field(default_factory=list)


class DrivenCore(Protocol):
    """What an engine drives: a core, or what stands before one and writes down its answers."""

    def handle(self, event: Event, now: float) -> Sequence[Action]: ...


class Engine:
    """One run of one core over one workload."""

    def __init__(self, core: DrivenCore, hardware: Hardware, workload: Workload) -> None:
        self._core = core
        self._workload = workload
        self._models = {model.id: model for model in workload.models}
        self._overhead_s = hardware.overhead_s
        self._hardware = hardware
        self._due: list[tuple[float, int, tuple[Event, ...], Dispatch | None]] = []
        self._order = 0
        self._load_s = 0.0
        self._beside = False
        self._computed_s: dict[SlotId, float] = {}
        self.run_result = SimulationRun(
            SimulationTally(
                hardware.gpus, [model.id for model in workload.models], workload.arriving_s
            )
        )
        for gpu in hardware.specs():
            core.handle(GpuJoined(gpu), 0.0)
        for model in workload.models:
            core.handle(ModelRegistered(self._declared(model)), 0.0)

    def run(self, progress: Progress | None = None) -> SimulationRun:
        arrivals, due, handle = self._workload.arrivals, self._due, self._core.handle
        carry_out, tally = self._carry_out, self.run_result.tally
        total = len(arrivals)
        arrived = 0
        while arrived < total or due:
            if due and (arrived == total or due[0][0] <= arrivals[arrived][0]):
                now, _, events, loaded = heappop(due)
                for event in events:
                    carry_out(handle(event, now), now)
                if loaded is not None:
                    self._compute(loaded, now)
                elif not events:
                    self._look_again(now)
                continue
            now, model = arrivals[arrived]
            request = Request(RequestId(f"r{arrived}"), model, (model,), BATCH)
            tally.arrived(request.id, now)
            arrived += 1
            carry_out(handle(RequestArrived(request), now), now)
            if progress is not None and arrived % _PROGRESS_EVERY == 0:
                progress(arrived, total)
        return self.run_result

    def _carry_out(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                self._dispatch(action, now)
            elif isinstance(action, Prepare):
                self._prepare(action, now)
            elif isinstance(action, Demote):
                self.run_result.tally.left(action.gpu, action.model)
            elif isinstance(action, SetTimer):
                self._push(action.at_s, (action.event,))
            elif isinstance(action, EnqueueLocally) and action.explanation is not None:
                self.run_result.explanations.append(action.explanation)

    def _prepare(self, action: Prepare, now: float) -> None:
        self.run_result.tally.prepared(action)
        done_s = now
        for load in action.loads:
            load_s = self._models[load.model].load_s
            done_s += load_s
            self.run_result.tally.loads(action.gpu, load.model, done_s)
            self._push(done_s, (ModelLoaded(action.gpu, load.model, load_s, load.source),))
        self._load_s, self._beside = done_s - now, action.beside
        if action.prefetch:
            self._push(done_s, (SlotFreed(action.slot, action.lease),))

    def _dispatch(self, action: Dispatch, now: float) -> None:
        self.run_result.tally.placed(action, now)
        if action.explanation is not None:
            self.run_result.explanations.append(action.explanation)
        if action.hit:
            self._compute(action, now)
        elif self._beside:  # others run meanwhile
            taken_s = self._hardware.load_takes * self._load_s
            computed_s = self._computed_s
            computed_s[action.slot] = max(now, computed_s.get(action.slot, 0.0)) + taken_s
            self._push(now + self._load_s, (), action)
        else:
            self._compute(action, now + self._load_s)

    def _compute(self, action: Dispatch, ready_s: float) -> None:
        """Run the requests of a lease once they are ready and the slot's compute is free."""
        model = self._models[action.models[0]]
        many, slots = len(action.requests), (action.slot, *action.more_slots)
        portion = -(-many // len(slots))
        run_s = self._hardware.run_s(model.run_s, portion)
        busy_s = self._overhead_s + run_s
        computed_s = self._computed_s
        begins_s = ready_s
        for slot in slots:
            begins_s = max(begins_s, computed_s.get(slot, 0.0))
        done_s = begins_s + busy_s
        for slot in slots:
            computed_s[slot] = done_s
        given = Configuration(many, 1, len(slots)) if len(slots) > 1 else None
        ran = RunFinished(action.slot, model.id, BATCH * many, busy_s, None, given)
        self._push(done_s, (ran, SlotFreed(action.slot, action.lease)))
        share = len(slots) / self._hardware.slots
        self.run_result.tally.answered(action.requests, done_s, run_s, share)

    def _look_again(self, now: float) -> None:
        """Nothing asks for it here; an engine whose slots run several leases at once does."""

    def _declared(self, model: SimModel) -> ModelSpec:
        """What the core is given beforehand: where batches save time, also how much."""
        batches = _BATCHES if self._hardware.merged else _ALONE
        times = [self._hardware.run_s(model.run_s, many) + self._overhead_s for many in batches]
        run_s = [
            (BATCH * many, ANY_GPU_TYPE, time_s)
            for many, time_s in zip(batches, times, strict=True)
        ]
        return structs.replace(model.spec(), run_s=tuple(run_s))

    def _push(self, at_s: float, events: tuple[Event, ...], loaded: Dispatch | None = None) -> None:
        """Have these events happen then; after them a lease is `loaded` that was beside runs."""
        self._order += 1
        heappush(self._due, (at_s, self._order, events, loaded))
