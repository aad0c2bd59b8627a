"""One round: a process is killed or frozen, and what its callers notice until they are served."""

import contextlib
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.measure.report import MeasurementFailed
from bench.recovery.running_stacks import RunningStack
from bench.recovery.steady_callers import SteadyCallers

_QUIET_S = 6.0  # of good answers, before a round
_LATEST_S = 75.0
_LEASE_S = 5.0
_POLL_S = 0.1
_SETTLED_S = 4.0


class Fault(NamedTuple):
    """What happens to which part."""

    part: str
    signal: signal.Signals

    @property
    def text(self) -> str:
        """The fault as a row of the table names it."""
        return "kill -9" if self.signal == signal.SIGKILL else "freeze"


@dataclass
class RoundFigures:
    """What one round showed; None where it did not happen within the round.

    `first_s` is the time until the first good answer to a call that began after the fault, `gap_s`
    the longest time without a good answer, for each function. `busy_s` is how long a GPU was shown
    as leased under a lease of before the fault.
    """

    fault: str
    part: str
    first_s: dict[str, float | None] = field(default_factory=dict)
    gap_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    busy_s: float | None = None


def measure_round(
    stack: RunningStack, callers: SteadyCallers, functions: Sequence[str], fault: Fault
) -> RoundFigures:
    """Wait for a quiet time, inject the fault, and watch until all functions are served again."""
    _until_quiet(callers, functions)
    pids = stack.pids(fault.part)
    if not pids:
        raise MeasurementFailed(f"no process of {fault.part}")
    held = _leases_held(stack)
    began_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, fault.signal)
    found = RoundFigures(fault.text, fault.part)
    try:
        ended_s = _watch(stack, callers, functions, began_s, held, found)
    finally:
        for pid in pids:  # those that still are there and frozen
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    _judge(found, callers, functions, began_s, ended_s)
    stack.restore()
    return found


def _until_quiet(callers: SteadyCallers, functions: Sequence[str]) -> None:
    """Wait until every function has answered well, and only well, for a while."""
    deadline_s = time.monotonic() + 2 * _LATEST_S
    while True:
        recent = callers.since(time.monotonic() - _QUIET_S)
        good = Counter(one.function for one in recent if one.succeeded)
        old = [s for s in callers.under_way().values() if s > _QUIET_S / 2]
        failed = [one for one in recent if not one.succeeded]
        if not failed and not old and all(good[name] >= _QUIET_S for name in functions):
            return
        if time.monotonic() > deadline_s:
            raise MeasurementFailed(f"no quiet time: {Counter(one[3:] for one in failed)}, {good}")
        time.sleep(_POLL_S)


def _leases_held(stack: RunningStack) -> frozenset[int]:
    """The leases shown as soon as there is a new one, which its function hardly uses yet."""
    deadline_s = time.monotonic() + _LEASE_S
    before = frozenset(stack.leases())
    while time.monotonic() < deadline_s:
        held = frozenset(stack.leases())
        if held - before:
            return held
        before = held
        time.sleep(_POLL_S / 10)
    return before


def _watch(
    stack: RunningStack,
    callers: SteadyCallers,
    functions: Sequence[str],
    began_s: float,
    held: frozenset[int],
    found: RoundFigures,
) -> float:
    """Watch leases and answers until both are as before; when the watch ended."""
    while True:
        now_s = time.monotonic()
        with contextlib.suppress(OSError):
            shown = stack.leases()
            if found.busy_s is None and not held & shown.keys():
                found.busy_s = time.monotonic() - began_s
        recent = callers.since(max(began_s, now_s - _SETTLED_S))
        served = Counter(one.function for one in recent if one.succeeded and one.began_s > began_s)
        failed = any(not one.succeeded for one in recent)
        settled = now_s - began_s > 2 * _SETTLED_S and not failed and found.busy_s is not None
        if settled and all(served[name] > _SETTLED_S for name in functions):
            return now_s
        if now_s - began_s > _LATEST_S:
            return now_s
        time.sleep(_POLL_S)


def _judge(
    found: RoundFigures,
    callers: SteadyCallers,
    functions: Sequence[str],
    began_s: float,
    ended_s: float,
) -> None:
    calls = callers.since(began_s)
    reasons: Counter[str] = Counter()
    for name in functions:
        own = [one for one in calls if one.function == name]
        good = sorted(one.ended_s for one in own if one.succeeded)
        later = [one.ended_s for one in own if one.succeeded and one.began_s >= began_s]
        found.first_s[name] = min(later) - began_s if later else None
        edges = [began_s, *good, ended_s]
        found.gap_s[name] = max(after - before for before, after in itertools.pairwise(edges))
        failures = [one for one in own if not one.succeeded]
        found.failed[name] = len(failures)
        reasons.update(f"{name}: {one.status} {one.text[:120]}" for one in failures)
    found.answers = dict(reasons.most_common())
