"""Runs cases in forked processes whose tensors lie between inaccessible pages, and says what broke.

Every case runs twice, with other bytes in fresh memory: results that differ show that an operator
gives bytes that it never wrote. A process that a signal ends names the case that ended it.
"""

import ctypes
import hashlib
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.calls.call import leave_modes
from gpu_manager.worker.executor import OPERATOR_ERRORS
from hunt.fuzz.arguments import NotStorable
from hunt.fuzz.cases import Case, Cases
from hunt.fuzz.merged_cases import Differs

PATTERNS = (0xA5, 0x5A)
_SET_DEATH_SIGNAL = 1  # of prctl
_MALLOC_PATTERN = -6  # M_PERTURB of mallopt
_MOST_BYTES = 64 << 20  # of one tensor
_PROCESS_BYTES = 2 << 30
_WORD = struct.Struct("<Q")
_FAILED, _FAILED_OTHERWISE, _DIFFERED = 1, 2, 3
_POLL_S = 0.02


class Finding(NamedTuple):
    """A case that an operator must not be allowed with."""

    case: Case
    what: str
    arguments: str


@dataclass
class Outcome:
    """What came of many cases."""

    findings: list[Finding] = field(default_factory=list)
    slow: list[Case] = field(default_factory=list)
    ran: int = 0
    gave_results: set[str] = field(default_factory=set)


@dataclass
class _Lane:
    """One of the two runs through the cases: a process at a time."""

    pattern: int
    results: mmap.mmap
    pid: int = 0
    done: bool = False
    seen: int = -1
    seen_s: float = 0.0
    ended_by: dict[int, str] = field(default_factory=dict)


def run(cases: Cases, chosen: Sequence[Case], limit_s: float) -> Outcome:
    """Run the cases; one that takes longer than the limit is left out."""
    lanes = [_Lane(pattern, mmap.mmap(-1, 8 * (len(chosen) + 1))) for pattern in PATTERNS]
    for lane in lanes:
        _fork(lane, cases, chosen, 0)
    while not all(lane.done for lane in lanes):
        time.sleep(_POLL_S)
        for lane in lanes:
            if not lane.done:
                _watch(lane, cases, chosen, limit_s)
    return _compared(cases, chosen, lanes)


def _watch(lane: _Lane, cases: Cases, chosen: Sequence[Case], limit_s: float) -> None:
    """Look after a lane's process; where it ended, another goes on behind the case."""
    pid, status = os.waitpid(lane.pid, os.WNOHANG)
    (at,) = _WORD.unpack_from(lane.results, 0)
    if not pid:
        now_s = time.monotonic()
        if at != lane.seen:
            lane.seen, lane.seen_s = at, now_s
        elif now_s - lane.seen_s > limit_s:
            lane.ended_by[at] = "time"
            os.kill(lane.pid, signal.SIGKILL)
            os.waitpid(lane.pid, 0)
            _fork(lane, cases, chosen, at + 1)
        return
    if os.WIFSIGNALED(status):
        lane.ended_by[at] = signal.Signals(os.WTERMSIG(status)).name
    elif os.WEXITSTATUS(status):
        raise RuntimeError(f"a process of the fuzz ended with {os.WEXITSTATUS(status)}")
    else:
        lane.done = True
        return
    _fork(lane, cases, chosen, at + 1)


def _fork(lane: _Lane, cases: Cases, chosen: Sequence[Case], start: int) -> None:
    if start >= len(chosen):
        lane.done = True
        return
    _WORD.pack_into(lane.results, 0, start)
    lane.seen, lane.seen_s = start, time.monotonic()
    lane.pid = os.fork()
    if not lane.pid:
        _child(lane, cases, chosen, start)


def _child(lane: _Lane, cases: Cases, chosen: Sequence[Case], start: int) -> NoReturn:
    status = 3
    try:
        guard = ctypes.CDLL(None)
        guard.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # no case outlives the command
        guard.mallopt(_MALLOC_PATTERN, lane.pattern)
        _limit()
        if not guard.guard_begin(ctypes.c_size_t(_MOST_BYTES)):
            os._exit(status)
        torch.set_grad_enabled(False)
        for at in range(start, len(chosen)):
            _WORD.pack_into(lane.results, 0, at)
            # The same place in both runs: sums depend on how their numbers are aligned.
            guard.guard_place(chosen[at].number % 2, lane.pattern)
            _WORD.pack_into(lane.results, 8 * (at + 1), _digest(cases, chosen[at]))
        status = 0
    finally:
        os._exit(status)


def _limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_PROCESS_BYTES, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def _digest(cases: Cases, case: Case) -> int:
    try:
        given, arguments = cases.call(case)
    except (*OPERATOR_ERRORS, MemoryError, NotStorable, CallRefused):
        return _FAILED
    except Differs:
        return _DIFFERED
    except BaseException:  # noqa: BLE001 - that is what is looked for
        return _FAILED_OTHERWISE
    finally:
        leave_modes()
    found = hashlib.blake2b(digest_size=8)
    try:
        for tensor in _tensors([given, arguments]):
            _add(found, tensor)
    except (RuntimeError, TypeError, NotImplementedError, MemoryError):
        return _FAILED
    return int.from_bytes(found.digest(), "little") | 4


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _add(found: Any, tensor: torch.Tensor) -> None:
    """The tensor's bytes, as a result of a call would carry them."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    found.update(str((plain.dtype, tuple(plain.shape))).encode())
    if plain.numel():
        flat = plain.contiguous().reshape(-1)
        if plain.dtype.is_floating_point or plain.dtype.is_complex:
            flat = torch.nan_to_num(flat, nan=0.25)  # which of the many NaNs does not matter
        found.update(flat.view(torch.uint8).numpy().tobytes())


def _compared(cases: Cases, chosen: Sequence[Case], lanes: Sequence[_Lane]) -> Outcome:
    outcome = Outcome(ran=len(chosen))
    for at, case in enumerate(chosen):
        ends = {lane.ended_by[at] for lane in lanes if at in lane.ended_by}
        results = [_WORD.unpack_from(lane.results, 8 * (at + 1))[0] for lane in lanes]
        if ends - {"time"}:
            what = ", ".join(sorted(ends - {"time"}))
            outcome.findings.append(Finding(case, what, _arguments(cases, case)))
        elif ends:
            outcome.slow.append(case)
        elif _FAILED_OTHERWISE in results:
            what = "it raises what the worker does not expect of an operator"
            outcome.findings.append(Finding(case, what, _arguments(cases, case)))
        elif _DIFFERED in results:
            what = "it gives something else when it runs with others"
            outcome.findings.append(Finding(case, what, _arguments(cases, case)))
        elif results[0] != results[1]:
            what = "its result depends on what memory held before"
            outcome.findings.append(Finding(case, what, _arguments(cases, case)))
        elif results[0] > _DIFFERED:
            outcome.gave_results.add(case.name)
    return outcome


def _arguments(cases: Cases, case: Case) -> str:
    arguments, named, _ = cases.described(case)
    return f"{arguments!r} {named!r}"[:1500]
