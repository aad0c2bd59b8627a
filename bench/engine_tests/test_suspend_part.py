"""The part `suspend` of `make gpu`: its rows, and what it does where a step fails."""

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import gpu_bench
from bench.gpu.checkpoint_driver import (
    CannotSuspend,
    CheckpointDriver,
    CudaCheckpoints,
    DriverRefused,
    EmulatedCheckpoints,
    timed,
)
from bench.gpu.gpu_bench import PartOptions, SharedNode
from bench.gpu.parts import suspend
from bench.gpu.parts.suspend import EMULATED, Case, measure
from bench.gpu.results_file import Row
from bench.gpu.suspended_process import Outputs, ProcessLost, Rights, SuspendedProcess
from bench.measure.report import MeasurementFailed
from gpu_manager.cuda.context import DriverAccount

MIB = 1 << 20


class IdleProcess:
    """A process that holds nothing, and gives outputs as one that does would."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._process = subprocess.Popen(["sleep", "300"])
        self.pid = self._process.pid
        self.asked = 0

    def wait_until_ready(self, _: float) -> list[str]:
        return [] if self._case.rights is Rights.ALL else ["no network"]

    def outputs(self, _: float) -> Outputs:
        self.asked += 1
        if self._process.poll() is not None:
            raise ProcessLost(self.fate())
        count = self._case.memory_bytes // 8
        return Outputs(count * (count - 1) // 2, "as before")

    def fate(self) -> str:
        code = self._process.poll()
        return "" if code is None else f"the process ended with {code}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class FailingDriver(EmulatedCheckpoints):
    """Does something else first in one of its steps, at the times given, counted from 1."""

    def __init__(self, step: str, times: set[int], fail: Callable[[int], object]) -> None:
        super().__init__()
        usual, numbers = getattr(self, step), itertools.count(1)

        def failing(pid: int, *more: object) -> None:
            if next(numbers) in times:
                fail(pid)
            usual(pid, *more)

        setattr(self, step, failing)


def fail_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def refuse(status: str) -> Callable[[int], object]:
    return fail_with(DriverRefused(status, "its words"))


def options(left_s: float = 300.0) -> PartOptions:
    deadline_s = time.monotonic() + left_s
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}  # noqa: TID251 - for a child
    return PartOptions("cpu:1", "emulated", Path(), deadline_s, environment, SharedNode("cpu:1"))


def measured(
    driver: CheckpointDriver | None = None,
    start: suspend.Start = IdleProcess,
    host_bytes: int = 1 << 40,
    left_s: float = 300.0,
) -> tuple[list[Row], str]:
    """The rows, and what the part says has failed."""
    rows: list[Row] = []
    made = driver or EmulatedCheckpoints()
    try:
        measure(options(left_s), rows.append, lambda _: made, start, lambda: host_bytes)
    except MeasurementFailed as error:
        return rows, str(error)
    return rows, ""


def of_cases(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "rounds" in row]


@pytest.mark.slow
def test_real_processes_give_the_same_after_they_were_stopped_and_continued() -> None:
    rows: list[Row] = []
    measure(options(), rows.append, host_bytes=lambda: 1 << 40)

    assert [row["rounds"] for row in of_cases(rows)] == [2, 2, 2]
    for row in of_cases(rows):
        assert (row["failures"], row["outputs_equal"]) == (0, True)
        assert row["states"] == "running, locked, checkpointed, locked, running"
        assert row["least_freed_bytes"] > row["bytes"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("rights", [Rights.GIVEN_UP, Rights.SANDBOX])
def test_process_without_rights_is_another_user_under_a_filter(rights: Rights) -> None:
    with closing(SuspendedProcess(MIB, rights, "cpu", options().environment)) as made:
        missing = made.wait_until_ready(100)
        status = Path(f"/proc/{made.pid}/status").read_text(encoding="utf-8")
        outputs = made.outputs(100)

    assert "\nSeccomp:\t2" in status, missing
    assert "\nUid:\t62345\t62345\t62345\t62345" in status
    assert outputs.total == sum(range(MIB // 8))


def test_rows_come_smallest_first_with_the_same_columns() -> None:
    rows, failed = measured()

    assert failed == ""
    cases = of_cases(rows)
    found = [(row["bytes"] // MIB, row["rounds"]) for row in cases]
    assert found == [(8, 2), (8, 2), (16, 2)]
    assert len({tuple(row) for row in cases}) == 1
    assert set(cases[0]["lock_s"]) == {"median", "min", "max"}
    assert cases[0]["used_bytes"]["checkpointed"] == 0
    assert cases[0]["used_bytes"]["restored"] > 0
    assert [row["sandbox_lacks"] for row in cases] == ["", "no network", ""]
    (other,) = [row for row in rows if row not in cases]
    assert (other["process"], "left out" in other) == (Rights.GIVEN_UP, True)


def test_failed_step_is_a_row_and_another_process_takes_the_next_round() -> None:
    driver = FailingDriver("checkpoint", {1}, refuse("CUDA_ERROR_OUT_OF_MEMORY"))
    rows, failed = measured(driver)

    assert failed == ""
    words = "CUDA_ERROR_OUT_OF_MEMORY: its words"
    told = {"round": 1, "failed": "checkpoint", "words": words, "state": "locked"}
    assert rows[0] == {**EMULATED[0].about, **told}
    assert rows[1]["failures"] == 1
    assert [row["rounds"] for row in of_cases(rows)] == [1, 2, 2]


def test_part_fails_in_the_end_when_no_round_of_a_size_succeeded() -> None:
    rows, failed = measured(FailingDriver("restore", {1, 2}, refuse("CUDA_ERROR_UNKNOWN")))

    assert failed.count("8 MiB, keeps its rights: restore: CUDA_ERROR_UNKNOWN") == 2
    assert [row["rounds"] for row in of_cases(rows)] == [0, 2, 2]
    assert (of_cases(rows)[0]["lock_s"], of_cases(rows)[0]["outputs_equal"]) == (None, None)


def test_sandbox_that_cannot_be_suspended_is_an_answer_and_its_half_is_tried() -> None:
    driver = FailingDriver("lock", {3, 4}, refuse("CUDA_ERROR_OPERATING_SYSTEM"))
    rows, failed = measured(driver)

    assert failed == ""
    assert [row["rounds"] for row in of_cases(rows)] == [2, 0, 2, 2]
    assert of_cases(rows)[2]["process"] == Rights.GIVEN_UP


def test_part_stops_when_the_driver_does_not_support_it() -> None:
    driver = FailingDriver("lock", {1}, refuse("CUDA_ERROR_NOT_SUPPORTED"))
    rows, failed = measured(driver)

    assert failed.startswith("8 MiB, keeps its rights: lock: CUDA_ERROR_NOT_SUPPORTED: its words")
    assert [row.get("failed") for row in rows] == ["lock", None]


def test_part_says_in_a_row_when_nothing_can_be_suspended_here() -> None:
    rows: list[Row] = []
    with pytest.raises(MeasurementFailed, match="no bindings"):
        measure(options(), rows.append, fail_with(CannotSuspend("no bindings")))

    assert rows == [{"suspending": "cannot be done here", "words": "no bindings"}]


@pytest.mark.parametrize(
    ("other", "right_times", "words"),
    [
        ({"total": 1}, 1, "the sum is 1, and was"),
        ({"replayed": "other"}, 1, "the graph gives other bytes"),
        ({"total": 1}, 0, "the sum is 1 before"),
    ],
)
def test_part_fails_when_outputs_differ(other: Row, right_times: int, words: str) -> None:
    class Changed(IdleProcess):
        def outputs(self, limit_s: float) -> Outputs:
            found = super().outputs(limit_s)
            is_right = self._case is not EMULATED[0] or self.asked <= right_times
            return found if is_right else found._replace(**other)

    rows, failed = measured(start=Changed)

    assert failed.startswith(f"8 MiB, keeps its rights: outputs differ: {words}")
    assert rows[0]["failed"] == "outputs"
    assert [row["outputs_equal"] for row in of_cases(rows)] == [False, True, True]


def test_process_that_dies_is_told_and_replaced() -> None:
    refusals = iter([lambda _: None, refuse("CUDA_ERROR_UNKNOWN")])

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        next(refusals)(pid)

    rows, failed = measured(FailingDriver("restore", {1, 3}, kill))

    ended = "the process ended with -9"
    words = [row["words"] for row in rows if "failed" in row]
    assert words == [ended, f"CUDA_ERROR_UNKNOWN: its words; {ended}"]
    assert ([row["rounds"] for row in of_cases(rows)], failed) == ([1, 1, 2], "")


def test_process_that_ends_before_it_is_ready_is_told() -> None:
    broken = {"PYTHONHOME": "/nowhere"}
    with (
        closing(SuspendedProcess(MIB, Rights.ALL, "cpu", broken)) as made,
        pytest.raises(ProcessLost, match="the process ended with 1"),
    ):
        made.wait_until_ready(100)


@pytest.mark.slow  # 10 s of waiting
def test_step_that_hangs_is_a_row_and_other_cases_go_on() -> None:
    over = threading.Event()
    driver = FailingDriver("lock", {1}, lambda _: over.wait())
    try:
        rows, failed = measured(driver)
    finally:
        over.set()

    assert (rows[0]["failed"], rows[0]["words"]) == ("lock", "no end within 10 s")
    assert "lock: no end within 10 s" in failed
    assert [row["rounds"] for row in of_cases(rows)] == [0, 2, 2]


def test_cases_without_time_are_told_and_fail_the_part() -> None:
    rows, failed = measured(left_s=-1.0)
    assert [row["left out"] for row in rows] == ["no time was left: 0 s of 8"] * len(EMULATED)
    assert failed.count("no time was left") == len(EMULATED)


def test_sizes_that_the_host_has_no_memory_for_are_left_out_and_no_failure() -> None:
    rows, failed = measured(host_bytes=7)
    assert failed == ""
    words = [f"the host has 7 bytes free of {mib * MIB + (1 << 30)}" for mib in (8, 8, 8, 16)]
    assert [row["left out"] for row in rows] == words


def test_rounds_stop_when_the_share_of_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=1000.0)
    clock = SimpleNamespace(monotonic=lambda: now.s)
    monkeypatch.setattr(suspend, "time", clock)
    monkeypatch.setattr(gpu_bench, "time", clock)

    def pass_time(_: int) -> None:
        now.s += 15.0

    rows: list[Row] = []
    driver = FailingDriver("lock", set(range(9)), pass_time)
    asked = PartOptions("cpu:1", "emulated", Path(), 1100.0, {}, SharedNode("cpu:1"))
    measure(asked, rows.append, lambda _: driver, IdleProcess, lambda: 1 << 40)

    # A share is 25 s at first, and what is left over goes to those that follow.
    assert [(row["rounds"], row["wanted"]) for row in of_cases(rows)] == [(1, 2), (1, 2), (2, 2)]


@pytest.fixture
def pid() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "300"])
    yield process.pid
    process.kill()
    process.wait()


def test_stand_in_stops_a_process_and_continues_it(pid: int) -> None:
    driver = EmulatedCheckpoints()
    driver.lock(pid, 0)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    driver.checkpoint(pid)
    driver.restore(pid)
    driver.unlock(pid)
    assert os.WIFCONTINUED(os.waitpid(pid, os.WCONTINUED)[1])
    assert driver.state(pid) == "running"


@pytest.mark.parametrize(
    "steps",
    [
        "checkpoint", "restore", "unlock", "lock lock", "lock restore", "lock checkpoint unlock",
        "lock checkpoint checkpoint", "lock checkpoint restore restore",
    ],
)  # fmt: skip
def test_stand_in_refuses_a_last_step_that_is_out_of_order(pid: int, steps: str) -> None:
    driver = EmulatedCheckpoints()
    calls = {"lock": lambda pid: driver.lock(pid, 0), "checkpoint": driver.checkpoint}
    calls |= {"restore": driver.restore, "unlock": driver.unlock}
    *before, last = steps.split()
    for step in before:
        calls[step](pid)
    with pytest.raises(DriverRefused, match="CUDA_ERROR_ILLEGAL_STATE"):
        calls[last](pid)


class Status(int):
    name = "CUDA_ERROR_NOT_READY"


class Bindings:
    """NVIDIA's bindings, as far as they are used: each call answers (status, value...)."""

    CUcheckpointLockArgs = SimpleNamespace

    def __init__(self, **answers: tuple[Any, ...]) -> None:
        self._answers = {"cuGetErrorString": (0, b"its words"), **answers}
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: object) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self._answers.get(name, (0,))

        return call


def test_driver_is_called_as_its_bindings_want_it() -> None:
    state = SimpleNamespace(name="CU_PROCESS_STATE_CHECKPOINTED")
    bindings = Bindings(
        cuCheckpointProcessGetState=(0, state), cuCheckpointProcessGetRestoreThreadId=(0, 78)
    )
    driver = CudaCheckpoints("GPU-1", bindings, {"GPU-1": DriverAccount(12)}.__getitem__)
    driver.lock(5, 1500)
    driver.checkpoint(5)
    driver.restore(5)
    driver.unlock(5)

    found = driver.state(5), driver.restore_thread(5), driver.used_bytes(5)
    assert found == ("checkpointed", 78, 12)
    assert bindings.calls == [
        ("cuInit", 0),
        ("cuCheckpointProcessLock", 5, SimpleNamespace(timeoutMs=1500)),
        ("cuCheckpointProcessCheckpoint", 5, None),
        ("cuCheckpointProcessRestore", 5, None),
        ("cuCheckpointProcessUnlock", 5, None),
        ("cuCheckpointProcessGetState", 5),
        ("cuCheckpointProcessGetRestoreThreadId", 5),
    ]


def test_refusal_of_the_driver_has_its_name_and_words() -> None:
    driver = CudaCheckpoints("GPU-1", Bindings(cuCheckpointProcessLock=(Status(600),)))
    with pytest.raises(DriverRefused, match="CUDA_ERROR_NOT_READY: its words") as refused:
        driver.lock(5, 1)
    assert refused.value.status == "CUDA_ERROR_NOT_READY"


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (SimpleNamespace(), "cuCheckpointProcessLock"),  # older than CUDA 12.8
        (Bindings(cuInit=(Status(100),)), "its words"),
    ],
)
def test_nothing_is_suspended_without_new_bindings_and_a_driver(bindings: Any, words: str) -> None:
    with pytest.raises(CannotSuspend, match=words):
        CudaCheckpoints("GPU-1", bindings)


def test_call_that_the_driver_does_not_have_is_not_supported() -> None:
    call = fail_with(RuntimeError('Function "cuCheckpointProcessLock" not found'))
    with pytest.raises(DriverRefused, match="CUDA_ERROR_NOT_SUPPORTED"):
        timed(call, 100)
