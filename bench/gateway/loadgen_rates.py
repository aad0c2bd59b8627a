"""The largest rate at which the 99th percentile holds, as MLPerf LoadGen's server scenario says."""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, median_low

from bench.gateway.call_cases import CallCase, OwnSettings
from bench.gateway.measured_calls import Target, warm_target
from bench.measure.peers.peer_installs import PeerSystem, PeerUnavailable, install, peer_python
from bench.measure.report import BenchReport

_ROOT = Path(__file__).parents[2]
_LATENCY_S = 0.02
# Of so many LoadGen lets 2 be late, of fewer than 662 none, of fewer than 459 it accepts nothing.
_QUERIES = 1_000
_FIRST, _LEAST, _CLOSE = 128.0, 32.0, 1.1
_TRIES = 2
_MOST_S = 300.0  # of one test: 1,000 queries at the least rate take half a minute
_ENTRY = re.compile(r"^\s*(\S.*?)\s*: (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LoadgenResult:
    """What LoadGen says of a test: whether it counts, and the 99th percentile."""

    valid: bool
    p99_s: float


@dataclass(frozen=True, slots=True)
class LargestRate:
    """The largest rate that counted, in calls a second, and its 99th percentile; 0 for none."""

    rate: float
    p99_s: float
    tests: int


def measure(
    report: BenchReport,
    chosen: Sequence[CallCase],
    rounds: int,
    seconds: float,
    tuned: OwnSettings,
) -> None:
    """A row for each case: the medians of its rounds."""
    report.add("\n## The largest rate within a latency, by MLPerf LoadGen\n")
    try:
        release = install(PeerSystem.LOADGEN)
    except PeerUnavailable as error:
        report.add(f"Not measured: {error}")
        return
    report.add(
        f"LoadGen {release}, server scenario: queries at Poisson intervals, whether answered or "
        f"not; a test counts if LoadGen calls it valid with a 99th percentile of "
        f"{1e3 * _LATENCY_S:g} ms and no call failed. The rate is doubled, then bisected to "
        f"{_CLOSE - 1:.0%}; one that does not count is tested twice. Tests of {seconds:g} s and "
        f"{_QUERIES} queries at least; medians of rounds ({rounds}). Every answer is checked.\n"
    )
    report.add("| call | system | calls/s within it | p99 there, ms | tests |")
    report.add("| --- | --- | ---: | ---: | ---: |")
    runs: dict[CallCase, list[LargestRate]] = {case: [] for case in chosen}
    for number in range(rounds):
        for case in chosen:
            print(f"round {number + 1} of {rounds}: LoadGen, {case}", file=sys.stderr, flush=True)
            runs[case].append(_of_case(case, seconds, tuned))
    for case, found in runs.items():
        rate, tests = median_low(run.rate for run in found), sum(run.tests for run in found)
        cells = f"none of {_LEAST:g} or more | "
        if rate:
            cells = f"{rate:,.0f} | {1e3 * median(run.p99_s for run in found if run.p99_s):.1f}"
        report.add(f"| {case.kind} | {case.system} | {cells} | {tests} |")
    report.facts["loadgen"] = [
        {"kind": case.kind, "system": case.system, "rounds": [asdict(run) for run in found]}
        for case, found in runs.items()
    ]


def _of_case(case: CallCase, seconds: float, tuned: OwnSettings) -> LargestRate:
    with warm_target(case, tuned) as target:
        return largest_rate(partial(_test, target, seconds))


def largest_rate(test: Callable[[float], LoadgenResult]) -> LargestRate:
    """Search by tests at different rates."""
    results: dict[float, list[LoadgenResult]] = {}

    def holds(rate: float) -> bool:
        """Another process may have had the cores during a test, hence the second."""
        found = results.setdefault(rate, [])
        while len(found) < _TRIES and not any(result.valid for result in found):
            found.append(test(rate))
        return found[-1].valid

    rate = _search(holds)
    p99_s = results[rate][-1].p99_s if rate else 0.0
    return LargestRate(rate, p99_s, sum(map(len, results.values())))


def _search(holds: Callable[[float], bool]) -> float:
    low = high = _FIRST
    if holds(_FIRST):
        while holds(high := 2 * low):
            low = high
    else:
        while not holds(low := high / 2):
            high = low
            if high <= _LEAST:
                return 0.0
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _test(target: Target, seconds: float, rate: float) -> LoadgenResult:
    """One test by LoadGen, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="loadgen") as folder:
        plan = {
            "url": target.url,
            "calls": [call.decode() for call in target.calls.calls],
            "rate": rate,
            "latency_s": _LATENCY_S,
            "seconds": seconds,
            "queries": _QUERIES,
            "folder": folder,
        }
        command = [str(peer_python(PeerSystem.LOADGEN)), "-m", "bench.gateway.loadgen_calls"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(plan),
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=_MOST_S,
            )
        except subprocess.TimeoutExpired:
            print(f"{rate:,.0f} calls/s: no end in {_MOST_S:g} s", file=sys.stderr, flush=True)
            return LoadgenResult(valid=False, p99_s=_MOST_S)
        found = json.loads(done.stdout)
        result = read_summary(Path(folder, "mlperf_log_summary.txt").read_text(encoding="utf-8"))
    target.calls.check(
        [(number, status, body.encode()) for number, status, body in found["answers"]]
    )
    print(f"{rate:,.0f} calls/s: {result}, {found['failed']} failed", file=sys.stderr, flush=True)
    return LoadgenResult(result.valid and not found["failed"], result.p99_s)


def read_summary(text: str) -> LoadgenResult:
    """What a summary of LoadGen says."""
    entries = dict(_ENTRY.findall(text))
    p99_ns = float(entries["99.00 percentile latency (ns)"])
    return LoadgenResult(entries["Result is"] == "VALID", p99_ns / 1e9)
