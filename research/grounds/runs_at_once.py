"""Runs at once on simulated GPUs: each is as fast as the others on its slot leave it."""

from collections.abc import Iterator

from research.grounds.paired_jobs import SharedHardware
from scheduler.model.actions import Dispatch
from scheduler.model.events import RunFinished, SlotFreed
from scheduler.model.values import SlotId
from scheduler.sim.engine import DrivenCore, Engine
from scheduler.sim.model_catalogue import BATCH
from scheduler.sim.workload import Workload

# Seconds of a run that do not count as left: sums of floats are not exact.
_NOTHING_S = 1e-9


class SharingEngine(Engine):
    """An engine whose slots run all their leases at once; a load delays no other lease."""

    def __init__(self, core: DrivenCore, hardware: SharedHardware, workload: Workload) -> None:
        super().__init__(core, hardware, workload)
        self._runs = RunsAtOnce(hardware)

    def _dispatch(self, action: Dispatch, now: float) -> None:
        self.run_result.tally.placed(action, now)
        if action.hit:
            self._compute(action, now)
        else:
            self._push(now + self._load_s, (), action)

    def _compute(self, action: Dispatch, ready_s: float) -> None:
        """Run the requests of a lease from now on, beside what the slot runs already."""
        many = len(action.requests)
        alone_s = self._overhead_s + self._hardware.run_s(
            self._models[action.models[0]].run_s, many
        )
        self._push(self._runs.begin(action, alone_s, ready_s), ())

    def _look_again(self, now: float) -> None:
        """End the runs that are due, and look again when the next one is."""
        for run in self._runs.due(now):
            action, busy_s = run.action, now - run.begun_s
            many = len(action.requests)
            ran = RunFinished(action.slot, action.models[0], BATCH * many, busy_s)
            self.run_result.tally.answered(action.requests, now, run.alone_s)
            for event in (ran, SlotFreed(action.slot, action.lease)):
                self._carry_out(self._core.handle(event, now), now)
        next_s = self._runs.next_s()
        if next_s is not None:
            self._push(next_s, ())


class SharedRun:
    """One lease's run: what is left of it if it were alone, and how much slower it is now."""

    __slots__ = ("action", "alone_s", "begun_s", "left_s", "slowdown")

    def __init__(self, action: Dispatch, alone_s: float, begun_s: float) -> None:
        self.action = action
        self.alone_s = self.left_s = alone_s
        self.begun_s = begun_s
        self.slowdown = 1.0


class RunsAtOnce:
    """The runs of every slot; a run that begins or ends changes how fast the others are."""

    def __init__(self, hardware: SharedHardware) -> None:
        self._hardware = hardware
        self._runs: dict[SlotId, list[SharedRun]] = {}
        self._seen_s: dict[SlotId, float] = {}

    def begin(self, action: Dispatch, alone_s: float, now: float) -> float:
        """A run begins; when the first run of its slot should end."""
        runs = self._runs.setdefault(action.slot, [])
        self._advance(action.slot, now)
        runs.append(SharedRun(action, alone_s, now))
        self._change_speeds(runs)
        return self._end_s(action.slot)

    def due(self, now: float) -> Iterator[SharedRun]:
        """The runs that have ended by now, each taken off its slot before it is given."""
        for slot in list(self._runs):
            if self._end_s(slot) > now + _NOTHING_S:
                continue
            self._advance(slot, now)
            runs = self._runs[slot]
            ended = [run for run in runs if run.left_s <= _NOTHING_S]
            self._runs[slot] = [run for run in runs if run.left_s > _NOTHING_S]
            self._change_speeds(self._runs[slot])
            yield from ended

    def next_s(self) -> float | None:
        """When the next run should end; None if none is there."""
        return min([self._end_s(slot) for slot, runs in self._runs.items() if runs], default=None)

    def _end_s(self, slot: SlotId) -> float:
        left_s = min([run.left_s * run.slowdown for run in self._runs[slot]], default=float("inf"))
        return self._seen_s[slot] + left_s

    def _advance(self, slot: SlotId, now: float) -> None:
        passed_s = now - self._seen_s.get(slot, now)
        for run in self._runs[slot]:
            run.left_s -= passed_s / run.slowdown
        self._seen_s[slot] = now

    def _change_speeds(self, runs: list[SharedRun]) -> None:
        for run in runs:
            others = [other.action.models[0] for other in runs if other is not run]
            run.slowdown = self._hardware.slowdown(run.action.models[0], others)
