"""Runs at once on simulated GPUs: each is as fast as the others on its slot leave it."""

from collections.abc import Iterator

from scheduler.model.actions import Dispatch
from scheduler.model.values import SlotId
from scheduler.sim.hardware import Hardware

# Seconds of a run that do not count as left: sums of floats are not exact.
_NOTHING_S = 1e-9


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

    def __init__(self, hardware: Hardware) -> None:
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
