"""The driver's calls that suspend another process, and a stand-in for where no GPU is.

A process runs, is locked (its calls to CUDA wait), checkpointed (its GPU memory lies in the host's,
and the GPU has nothing of it), restored, which leaves it locked, and unlocked. Whoever calls needs
the rights over the process that a debugger needs. By the driver's documents managed memory and
memory lent by CUDA IPC are not supported, and a step that failed may leave the process useless.
"""

import contextlib
import importlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from gpu_manager.cuda.context import DriverAccount, read_account

NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"
_SUCCESS = 0
_BINDINGS = "cuda.bindings.driver"
_STATE = "CU_PROCESS_STATE_"


class CannotSuspend(Exception):
    """No process can be suspended here: no bindings, no driver, or one that is too old."""


class DriverRefused(Exception):
    """The driver refused a step; `status` is its name for the reason."""

    def __init__(self, status: str, words: str) -> None:
        super().__init__(f"{status}: {words}")
        self.status = status


class DriverHangs(Exception):
    """A call of the driver has not come to its end in time."""


class CheckpointDriver(Protocol):
    """The steps; each raises DriverRefused, and leaves the process in the state that it is in."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Have the process's calls to CUDA wait, as soon as its work on the GPU is done."""

    def checkpoint(self, pid: int) -> None:
        """Move its GPU memory to the host's."""

    def restore(self, pid: int) -> None:
        """Move it back, to the same addresses."""

    def unlock(self, pid: int) -> None:
        """Let its calls go on."""

    def state(self, pid: int) -> str:
        """Its state: running, locked, checkpointed or failed."""

    def restore_thread(self, pid: int) -> int:
        """Its thread that carries the steps out."""

    def used_bytes(self, pid: int) -> int | None:
        """The bytes of the GPU that are in use by NVML, by all processes."""


def timed(call: Callable[[], Any], limit_s: float) -> tuple[Any, float]:
    """What a call of the driver gives, and its seconds; DriverRefused, or DriverHangs.

    A call that hangs is left behind in its thread: the end of the other process may end it.
    """
    answers: queue.Queue[tuple[Any, float] | DriverRefused] = queue.Queue()

    def work() -> None:
        began_s = time.perf_counter()
        try:
            value = call()
        except DriverRefused as error:
            answers.put(error)
        except RuntimeError as error:  # of the bindings: this driver has no such call
            answers.put(DriverRefused(NOT_SUPPORTED, str(error)))
        else:
            answers.put((value, time.perf_counter() - began_s))

    threading.Thread(target=work, name="driver-call", daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise DriverHangs(f"no end within {limit_s:.0f} s") from None
    if isinstance(answer, DriverRefused):
        raise answer
    return answer


class CudaCheckpoints:
    """NVIDIA's driver by its own bindings, which let other threads run during a call."""

    def __init__(
        self,
        uuid: str,
        bindings: Any = None,
        account: Callable[[str], DriverAccount] = read_account,
    ) -> None:
        """CannotSuspend where it is clear already; all but the UUID stand in for a GPU in tests."""
        self._uuid = uuid
        self._account = account
        try:
            self._driver = bindings or importlib.import_module(_BINDINGS)
            self._driver.cuCheckpointProcessLock  # noqa: B018 - bindings before CUDA 12.8 lack it
            self._done(self._driver.cuInit(0))  # without it a process cannot be restored
        except (ImportError, AttributeError, RuntimeError, DriverRefused) as error:
            raise CannotSuspend(f"{type(error).__name__}: {error}") from error

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Refused with CUDA_ERROR_NOT_READY, and still running, where the time runs out."""
        limits = self._driver.CUcheckpointLockArgs()
        limits.timeoutMs = timeout_ms
        self._done(self._driver.cuCheckpointProcessLock(pid, limits))

    def checkpoint(self, pid: int) -> None:
        """To memory of the host that the driver takes for it."""
        self._done(self._driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> None:
        """To the GPU that it was on."""
        self._done(self._driver.cuCheckpointProcessRestore(pid, None))

    def unlock(self, pid: int) -> None:
        """Only a locked process."""
        self._done(self._driver.cuCheckpointProcessUnlock(pid, None))

    def state(self, pid: int) -> str:
        """The driver's name for it in small letters."""
        found = self._done(self._driver.cuCheckpointProcessGetState(pid))
        return str(getattr(found, "name", found)).removeprefix(_STATE).lower()

    def restore_thread(self, pid: int) -> int:
        """Its number, as in /proc/PID/task."""
        return int(self._done(self._driver.cuCheckpointProcessGetRestoreThreadId(pid)))

    def used_bytes(self, pid: int) -> int | None:  # noqa: ARG002 - processes may have other numbers there
        """None where NVML does not say."""
        return self._account(self._uuid).used_bytes

    def _done(self, answer: tuple[Any, ...]) -> Any:
        """What a call of the driver gave."""
        status, *found = answer
        if int(status) != _SUCCESS:
            raise DriverRefused(getattr(status, "name", str(status)), self._words(status))
        return found[0] if found else None

    def _words(self, status: Any) -> str:
        failed, words = self._driver.cuGetErrorString(status)
        return "no words" if int(failed) != _SUCCESS else words.decode(errors="replace")


class ProcessState(StrEnum):
    """As the driver names them."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"


class EmulatedCheckpoints:
    """Stops and continues a process that uses no GPU, with the states that the driver has."""

    def __init__(self) -> None:
        self._states: dict[int, ProcessState] = {}

    def lock(self, pid: int, timeout_ms: int) -> None:  # noqa: ARG002 - it stops at once
        """Stop it whole, where the driver would only have its calls to CUDA wait."""
        self._change(pid, ProcessState.RUNNING, ProcessState.LOCKED)
        self._signal(pid, signal.SIGSTOP)

    def checkpoint(self, pid: int) -> None:
        """Its memory stays where it is."""
        self._change(pid, ProcessState.LOCKED, ProcessState.CHECKPOINTED)

    def restore(self, pid: int) -> None:
        """Only what was checkpointed."""
        self._change(pid, ProcessState.CHECKPOINTED, ProcessState.LOCKED)

    def unlock(self, pid: int) -> None:
        """Continue it."""
        self._change(pid, ProcessState.LOCKED, ProcessState.RUNNING)
        self._signal(pid, signal.SIGCONT)

    def state(self, pid: int) -> str:
        """A process that was never locked is running."""
        self._signal(pid, 0)
        return self._states.get(pid, ProcessState.RUNNING)

    def restore_thread(self, pid: int) -> int:
        """The process's first thread, since it has none for this."""
        self._signal(pid, 0)
        return pid

    def used_bytes(self, pid: int) -> int | None:
        """The process's own memory, and nothing while it is checkpointed."""
        if self.state(pid) == ProcessState.CHECKPOINTED:
            return 0
        with contextlib.suppress(FileNotFoundError):
            pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
            return int(pages) * os.sysconf("SC_PAGESIZE")
        return None

    def _change(self, pid: int, before: ProcessState, after: ProcessState) -> None:
        found = self.state(pid)
        if found != before:
            raise DriverRefused("CUDA_ERROR_ILLEGAL_STATE", f"the process is {found}, not {before}")
        self._states[pid] = after

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError as error:
            raise DriverRefused("CUDA_ERROR_INVALID_VALUE", "no such process") from error
