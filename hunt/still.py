"""Runs the tests of `make test` on a machine that is busy and stands still for seconds.

    python -m hunt.still                        # ten rounds
    python -m hunt.still --times 3 -- tests/unit/common tests/contract

Beside them a few processes compute without end, and processes of the run, whichever they are, are
stopped for up to five seconds, one after the other; what a program of ours has started, for less
than it takes to count as frozen (it would be killed). A test that fails in any round fails by
chance. What each round said is in out/still/; the seed decides who is stopped when, as far as it
can.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from common.liveness import LivenessTimes
from tests.kit.places import ROOT

_OUT = ROOT / "out" / "still"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_OURS = re.compile(r"(?:.*/)?gpufaas(?:\.\w+)*")
_PROGRAM_WORDS = 4  # as in python -P -m gpufaas
_COMPUTE = "while True: pass"
_LONGEST_WATCHED_S = 0.8 * LivenessTimes().stopped_s


class _Process(NamedTuple):
    pid: int
    watched: bool  # by a program of ours, which takes it for frozen if it is stopped for long


def main(arguments: Sequence[str]) -> int:
    """0 if no test failed in any round."""
    parser = argparse.ArgumentParser(prog="hunt.still", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="rounds (10)")
    parser.add_argument("--busy", type=int, default=4, help="processes that compute (4)")
    parser.add_argument("--longest", type=float, default=5.0, help="seconds of a stop (5)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between stops (1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("pytest", nargs="*", help="pytest's arguments, instead of all tests")
    asked = parser.parse_args(arguments)
    _OUT.mkdir(parents=True, exist_ok=True)
    failed: Counter[str] = Counter()
    broken = 0
    with _busy(asked.busy):
        for number in range(1, asked.times + 1):
            chance = random.Random(asked.seed * 1000 + number)
            words = asked.pytest or ["--numprocesses", str((os.cpu_count() or 1) + 2)]
            status, tests, took_s, stops = _round(number, words, chance, asked)
            failed.update(tests)
            broken += status != 0
            print(
                f"round {number}: exit {status}, {len(tests)} failed, {took_s:.0f} s, "
                f"{stops} stops",
                flush=True,
            )
    for test, rounds in failed.most_common():
        print(f"{rounds:3d} {test}")
    return 1 if broken else 0


def _round(
    number: int, words: Sequence[str], chance: random.Random, asked: argparse.Namespace
) -> tuple[int, list[str], float, int]:
    log = _OUT / f"{number}.txt"
    began_s = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, stdout=output, stderr=output
        )
    over = threading.Event()
    stops = [0]

    def stop_some() -> None:
        while not over.wait(chance.expovariate(1 / asked.every)):
            process = chance.choice(_tree(run.pid))
            longest_s = _LONGEST_WATCHED_S if process.watched else asked.longest
            stops[0] += _stopped(process.pid, chance.uniform(0, longest_s), over)

    stopping = threading.Thread(target=stop_some)
    stopping.start()
    try:
        status = run.wait()
    finally:
        over.set()
        stopping.join()
        if run.poll() is None:  # this program is being ended
            run.terminate()
            run.wait()
    tests = _FAILED.findall(log.read_text(encoding="utf-8", errors="replace"))
    return status, tests, time.monotonic() - began_s, stops[0]


def _stopped(pid: int, seconds: float, over: threading.Event) -> bool:
    """Stop the process for so long; whether it was there."""
    try:
        # By a descriptor, so that no later process with its number is meant.
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            over.wait(seconds)
            signal.pidfd_send_signal(process, signal.SIGCONT)
            return True
    finally:
        os.close(process)
    return False


def _tree(root: int) -> list[_Process]:
    """The process and all that came of it, as far as their parents live."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(path.name))
    found, ahead = list[_Process](), [_Process(root, watched=False)]
    while ahead:
        process = ahead.pop()
        found.append(process)
        watched = process.watched or _is_ours(process.pid)
        ahead += [_Process(pid, watched) for pid in children.get(process.pid, [])]
    return sorted(found)


def _is_ours(pid: int) -> bool:
    """Whether the process runs a program of ours: `gpufaas`, or a module of it."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return False
    return any(_OURS.fullmatch(word) for word in command.split("\0")[:_PROGRAM_WORDS])


@contextmanager
def _busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _COMPUTE]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    # Who ends it leaves no process that is stopped, and none that computes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
