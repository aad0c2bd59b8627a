"""Runs searches in processes of their own, with bounded memory, and ends one that hangs.

A process that a signal ends, or that does not come to the next input, names the input by which it
did so.
"""

import base64
import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from hunt.parsers.input_search import InputSearch, SearchReport
from hunt.parsers.parser_target import Target

_SET_DEATH_SIGNAL = 1  # of prctl
_MORE_BYTES = 1 << 30  # of data that a search may have beyond what its process has at first
_HEAD = struct.Struct("<QI")  # how many inputs were tried, the size of the one that is tried now
_POLL_S = 0.05
_FAILED = 3


class SearchPlan(NamedTuple):
    """How long each target is searched, and what for."""

    seconds: float
    seed: int
    hang_s: float  # without another input in so much time, a search hangs
    folders: Sequence[str]


@dataclass
class _Lane:
    """One target's search while it runs."""

    target: Target
    shared: mmap.mmap
    result: Path
    pid: int = 0
    seen: int = -1
    seen_s: float = 0.0


def searched(
    targets: Sequence[tuple[Target, Sequence[bytes]]], plan: SearchPlan, lanes: int, folder: Path
) -> Iterator[tuple[Target, SearchReport]]:
    """Search all targets, so many at a time; each report as soon as its search has ended."""
    waiting = list(targets)
    running: list[_Lane] = []
    while waiting or running:
        while waiting and len(running) < lanes:
            target, known = waiting.pop(0)
            running.append(_started(target, known, plan, folder))
        time.sleep(_POLL_S)
        for lane in list(running):
            report = _ended(lane, plan)
            if report is not None:
                running.remove(lane)
                yield lane.target, report


def _started(target: Target, known: Sequence[bytes], plan: SearchPlan, folder: Path) -> _Lane:
    shared = mmap.mmap(-1, _HEAD.size + target.most_bytes)
    lane = _Lane(target, shared, folder / f"{target.name}.result")
    lane.result.unlink(missing_ok=True)
    lane.seen_s = time.monotonic()
    sys.stdout.flush()
    lane.pid = os.fork()
    if not lane.pid:
        _child(lane, known, plan)
    return lane


def _child(lane: _Lane, known: Sequence[bytes], plan: SearchPlan) -> NoReturn:
    status = _FAILED
    try:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # no search outlives the command
        _limit_memory()
        tried = 0

        def note(data: bytes) -> None:
            nonlocal tried
            tried += 1
            kept = data[: lane.target.most_bytes]
            lane.shared[_HEAD.size : _HEAD.size + len(kept)] = kept
            _HEAD.pack_into(lane.shared, 0, tried, len(kept))

        search = InputSearch(lane.target, known, plan.folders, plan.seed, note)
        lane.result.write_text(_packed(search.run(plan.seconds)), encoding="utf-8")
        status = 0
    except BaseException:  # noqa: BLE001 - the command says it, and this process ends
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _limit_memory() -> None:
    used_kib = next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if line.startswith("VmData")
    )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((used_kib << 10) + _MORE_BYTES, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _ended(lane: _Lane, plan: SearchPlan) -> SearchReport | None:
    """The report of a search that has ended, or that hangs and is ended now."""
    pid, status = os.waitpid(lane.pid, os.WNOHANG)
    tried, size = _HEAD.unpack_from(lane.shared, 0)
    data = lane.shared[_HEAD.size : _HEAD.size + size]
    if not pid:
        now_s = time.monotonic()
        if tried != lane.seen:
            lane.seen, lane.seen_s = tried, now_s
        if now_s - lane.seen_s <= plan.hang_s:
            return None
        os.kill(lane.pid, signal.SIGKILL)
        os.waitpid(lane.pid, 0)
        return _broken(lane, tried, f"no end within {plan.hang_s:g} s", data)
    if os.WIFSIGNALED(status):
        return _broken(lane, tried, signal.Signals(os.WTERMSIG(status)).name, data)
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"the search of {lane.target.name} failed; its words are above")
    return _unpacked(lane.result.read_text(encoding="utf-8"))


def _broken(lane: _Lane, tried: int, what: str, data: bytes) -> SearchReport:
    return SearchReport(tried, faults={f"the process of {lane.target.name}": (what, data)})


def _packed(report: SearchReport) -> str:
    return json.dumps(
        {
            "tried": report.tried,
            "arcs": report.arcs,
            "seconds": report.seconds,
            "kept": [_text(each) for each in report.kept],
            "faults": {where: [what, _text(data)] for where, (what, data) in report.faults.items()},
        }
    )


def _unpacked(text: str) -> SearchReport:
    found = json.loads(text)
    return SearchReport(
        found["tried"],
        found["arcs"],
        found["seconds"],
        [base64.b64decode(each) for each in found["kept"]],
        {where: (what, base64.b64decode(data)) for where, (what, data) in found["faults"].items()},
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
