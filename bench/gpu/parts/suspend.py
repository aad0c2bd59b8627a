"""Suspending a process by the driver: the time of each step, the memory freed, and the outputs.

A process like a worker's, with memory full of known numbers and a recorded graph, is locked,
checkpointed, restored and unlocked by this one, again and again.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.checkpoint_driver import (
    NOT_SUPPORTED,
    CannotSuspend,
    CheckpointDriver,
    CudaCheckpoints,
    DriverHangs,
    DriverRefused,
    EmulatedCheckpoints,
    timed,
)
from bench.gpu.gpu_bench import PartOptions, Say
from bench.gpu.results_file import Row
from bench.gpu.suspended_process import (
    Outputs,
    ProcessLost,
    Rights,
    Suspended,
    SuspendedProcess,
    expected_total,
)
from bench.measure.report import MeasurementFailed
from cache_manager.model.ids import NodeId
from gpu_manager.devices.host_memory import available_bytes
from gpu_manager.node.host_gpus import choose_devices

_GB, _MIB = 10**9, 1 << 20
_LOCK_MS = 5_000
# A process that failed a step may be useless: the next round has a new one, but not for ever.
_MOST_FAILURES = 2
# What a process needs to start and to be suspended once, and how slowly it is given up on.
_BEGIN_S, _BEGIN_BYTES_S = 8.0, 2e9
_STEP_S, _STEP_BYTES_S = 10.0, 0.5e9
_READY_S = 45.0
# Beyond the part's time, so that a step which hangs is told before the part is stopped.
_GRACE_S, _LEAST_S = 4.0, 0.5
_HOST_REST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of process, and how often it is suspended."""

    rights: Rights
    memory: str
    memory_bytes: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.memory}, {self.rights}"

    @property
    def about(self) -> Row:
        """The first columns of all its rows."""
        return {"process": self.rights.value, "memory": self.memory, "bytes": self.memory_bytes}


CASES = (
    Case(Rights.ALL, "1 GB", _GB, 10),
    Case(Rights.SANDBOX, "1 GB", _GB, 3),
    Case(Rights.GIVEN_UP, "1 GB", _GB, 3),
    Case(Rights.ALL, "5 GB", 5 * _GB, 10),
    Case(Rights.ALL, "20 GB", 20 * _GB, 10),
)
EMULATED = (
    Case(Rights.ALL, "8 MiB", 8 * _MIB, 2),
    Case(Rights.SANDBOX, "8 MiB", 8 * _MIB, 2),
    Case(Rights.GIVEN_UP, "8 MiB", 8 * _MIB, 2),
    Case(Rights.ALL, "16 MiB", 16 * _MIB, 2),
)


MakeDriver = Callable[[str], CheckpointDriver]  # for the GPU of this UUID
Start = Callable[[Case], Suspended]


class Round(NamedTuple):
    """One suspension: seconds of each step, bytes in use, and states between the steps."""

    seconds: dict[str, float]
    used_bytes: dict[str, int | None]
    states: list[str]


class StepFailed(Exception):
    """A step failed, or what the process gave was wrong."""

    def __init__(self, step: str, words: str, *, status: str = "", hangs: bool = False) -> None:
        super().__init__(f"{step}: {words}")
        self.step = step
        self.words = words
        self.status = status
        self.hangs = hangs


def measure(
    asked: PartOptions,
    say: Say,
    make_driver: MakeDriver | None = None,
    start: Start | None = None,
    host_bytes: Callable[[], int] = available_bytes,
) -> None:
    """One row a case, and one for each failure; the last three stand in for others in tests."""
    device = "cpu" if asked.emulated else _uuid(asked)
    make_driver = make_driver or (_emulated if asked.emulated else CudaCheckpoints)
    try:
        driver = make_driver(device)
    except CannotSuspend as error:
        say({"suspending": "cannot be done here", "words": str(error)})
        raise MeasurementFailed(f"no process can be suspended: {error}") from error
    start = start or _starter(asked, device)
    wrong: list[str] = []
    answered = False  # whether suspending works from a whole sandbox, of which the rest is a part
    cases = EMULATED if asked.emulated else CASES
    for number, case in enumerate(cases):
        needed_s = _BEGIN_S + case.memory_bytes / _BEGIN_BYTES_S
        needed_bytes = case.memory_bytes + _HOST_REST_BYTES
        if case.rights is Rights.GIVEN_UP and answered:
            say({**case.about, "left out": "it works from a worker's whole sandbox"})
        elif asked.left_s() < needed_s:
            words = f"no time was left: {max(0.0, asked.left_s()):.0f} s of {needed_s:.0f}"
            wrong.append(f"{case}: {words}")
            say({**case.about, "left out": words})
        elif (free_bytes := host_bytes()) < needed_bytes:
            words = f"the host has {free_bytes} bytes free of {needed_bytes}"
            say({**case.about, "left out": words})
        else:
            share_s = asked.left_s() / (len(cases) - number)
            run = _CaseRun(case, asked, say, driver, start, share_s)
            wrong += [f"{case}: {words}" for words in run.run()]
            if run.unsupported:
                break
            answered |= case.rights is Rights.SANDBOX and run.works
    if wrong:
        raise MeasurementFailed("; ".join(wrong))


class _CaseRun:
    """The rounds of one case, as many as its share of the time allows."""

    def __init__(
        self,
        case: Case,
        asked: PartOptions,
        say: Say,
        driver: CheckpointDriver,
        start: Start,
        share_s: float,
    ) -> None:
        self._case = case
        self._asked = asked
        self._say = say
        self._driver = driver
        self._start = start
        self._until_s = time.monotonic() + share_s
        self._begin_s = self._round_s = 0.0  # the longest so far
        self._rounds: list[Round] = []
        self._failures: list[StepFailed] = []
        self._missing: list[str] = []
        self._thread = ""

    @property
    def works(self) -> bool:
        """Whether a process was suspended, and went on as before."""
        return bool(self._rounds)

    @property
    def unsupported(self) -> bool:
        """Whether the driver says that it cannot suspend even a process with all its rights."""
        return self._case.rights is Rights.ALL and any(
            failure.status == NOT_SUPPORTED for failure in self._failures
        )

    def run(self) -> list[str]:
        """Say its rows; what makes the whole measurement fail."""
        while self._goes_on(self._begin_s + self._round_s):
            try:
                with closing(self._start(self._case)) as process:
                    self._suspend(process)
            except StepFailed as failure:
                self._failures.append(failure)
        self._say(self._row())
        differing = [failure.words for failure in self._failures if failure.step == "outputs"]
        wrong = [f"outputs differ: {words}" for words in differing]
        # What a sandbox does not let the driver do is an answer, and no failure to measure.
        if not self._rounds and self._case.rights is Rights.ALL:
            wrong += [str(failure) for failure in self._failures if failure.step != "outputs"]
        return wrong

    def _goes_on(self, needed_s: float) -> bool:
        """Whether one more round is wanted, and has time; the first one is tried in any case."""
        failures = self._failures
        if len(failures) >= _MOST_FAILURES or any(
            failure.hangs or failure.status == NOT_SUPPORTED for failure in failures
        ):
            return False
        if len(self._rounds) + len(failures) >= self._case.rounds:
            return False
        first = not self._rounds and not failures
        return first or time.monotonic() + needed_s <= self._until_s

    def _suspend(self, process: Suspended) -> None:
        """Suspend one process as often as it lasts; StepFailed where it does not."""
        try:
            first = self._begin(process)
            while self._goes_on(self._round_s):
                began_s = time.monotonic()
                found = self._round(process)
                self._compare(process, first)
                self._rounds.append(found)
                self._round_s = max(self._round_s, time.monotonic() - began_s)
        except StepFailed as failure:
            self._tell(failure, process)
            raise

    def _begin(self, process: Suspended) -> Outputs:
        """Wait until it holds what it shall hold; its outputs before all suspensions."""
        began_s = time.monotonic()
        try:
            self._missing = process.wait_until_ready(self._limit_s(_READY_S))
        except ProcessLost as error:
            raise StepFailed("start", str(error)) from error
        first = self._outputs(process)
        expected = expected_total(self._case.memory_bytes)
        if first.total != expected:
            raise StepFailed("outputs", f"the sum is {first.total} before, not {expected}")
        self._thread = self._thread or self._restore_thread(process.pid)
        self._begin_s = max(self._begin_s, time.monotonic() - began_s)
        return first

    def _round(self, process: Suspended) -> Round:
        driver, pid = self._driver, process.pid
        steps: Sequence[tuple[str, Callable[[], None], str]] = (
            ("lock", lambda: driver.lock(pid, _LOCK_MS), ""),
            ("checkpoint", lambda: driver.checkpoint(pid), "checkpointed"),
            ("restore", lambda: driver.restore(pid), "restored"),
            ("unlock", lambda: driver.unlock(pid), ""),
        )
        used = {"before": self._within("account", lambda: driver.used_bytes(pid))[0]}
        states = [self._within("state", lambda: driver.state(pid))[0]]
        seconds = {}
        for step, work, moment in steps:
            _, seconds[step] = self._within(step, work)
            states.append(self._within("state", lambda: driver.state(pid))[0])
            if moment:
                used[moment] = self._within("account", lambda: driver.used_bytes(pid))[0]
        return Round(seconds, used, states)

    def _compare(self, process: Suspended, first: Outputs) -> None:
        found = self._outputs(process)
        if found.total != first.total:
            raise StepFailed("outputs", f"the sum is {found.total}, and was {first.total}")
        if found.replayed != first.replayed:
            raise StepFailed("outputs", "the graph gives other bytes than before")

    def _outputs(self, process: Suspended) -> Outputs:
        try:
            return process.outputs(self._step_limit_s())
        except ProcessLost as error:
            raise StepFailed("answer", str(error)) from error

    def _restore_thread(self, pid: int) -> str:
        """The name of the thread that will restore it, or the driver's words."""
        try:
            thread = self._within("restore thread", lambda: self._driver.restore_thread(pid))[0]
            name = Path(f"/proc/{pid}/task/{thread}/comm").read_text(encoding="utf-8").strip()
        except (StepFailed, OSError) as error:
            return str(error)
        return f"{thread} ({name})"

    def _within(self, step: str, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call of the driver gives, and its seconds; StepFailed also if it hangs."""
        try:
            return timed(call, self._step_limit_s())
        except DriverRefused as error:
            raise StepFailed(step, str(error), status=error.status) from error
        except DriverHangs as error:
            raise StepFailed(step, str(error), hangs=True) from error

    def _step_limit_s(self) -> float:
        return self._limit_s(_STEP_S + self._case.memory_bytes / _STEP_BYTES_S)

    def _limit_s(self, usual_s: float) -> float:
        return max(_LEAST_S, min(usual_s, self._asked.left_s() + _GRACE_S))

    def _tell(self, failure: StepFailed, process: Suspended) -> None:
        """The failure as a row, with the state that it has left."""
        if failure.hangs:
            state = "not asked"
        else:
            try:
                state = self._within("state", lambda: self._driver.state(process.pid))[0]
            except StepFailed as error:
                state = error.words
        fate = process.fate()
        words = failure.words if not fate or fate in failure.words else f"{failure.words}; {fate}"
        number = len(self._rounds) + len(self._failures) + 1
        failed = {"round": number, "failed": failure.step, "words": words, "state": state}
        self._say({**self._case.about, **failed})

    def _row(self) -> Row:
        rounds = self._rounds
        counted = {"rounds": len(rounds), "wanted": self._case.rounds}
        steps = {
            f"{step}_s": _spread([found.seconds[step] for found in rounds])
            for step in ("lock", "checkpoint", "restore", "unlock")
        }
        moments = ("before", "checkpointed", "restored")
        used = {
            moment: _median([found.used_bytes[moment] for found in rounds]) for moment in moments
        }
        freed = [
            before - during
            for found in rounds
            if (before := found.used_bytes["before"]) is not None
            and (during := found.used_bytes["checkpointed"]) is not None
        ]
        sequences = dict.fromkeys(", ".join(found.states) for found in rounds)
        differing = any(failure.step == "outputs" for failure in self._failures)
        return {
            **self._case.about,
            **counted,
            "failures": len(self._failures),
            **steps,
            "used_bytes": used,
            "least_freed_bytes": min(freed, default=None),
            "outputs_equal": not differing if rounds or differing else None,
            "states": "; ".join(sequences),
            "restore_thread": self._thread,
            "sandbox_lacks": ", ".join(self._missing),
        }


def _emulated(device: str) -> CheckpointDriver:
    assert device == "cpu", "it suspends no process that uses a GPU"
    return EmulatedCheckpoints()


def _uuid(asked: PartOptions) -> str:
    """The driver's name for the GPU."""
    visible = asked.environment.get("CUDA_VISIBLE_DEVICES")
    devices = choose_devices(asked.devices, NodeId("bench"), visible=visible)
    try:
        return devices[0].worker_device.removeprefix("cuda:")
    finally:
        for device in devices:
            device.close()


def _starter(asked: PartOptions, device: str) -> Start:
    """Start real processes, with a worker's environment."""
    seen = "" if device == "cpu" else device
    ours = {"CUDA_VISIBLE_DEVICES": seen, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def start(case: Case) -> Suspended:
        environment = {**asked.environment, **ours}
        return SuspendedProcess(case.memory_bytes, case.rights, device, environment)

    return start


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _median(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return statistics.median_low(known) if known else None
