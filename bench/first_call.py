"""`python -m bench.first_call`: the first GPU function of a stack, deployed and called at once.

Each measurement has a stack of its own, whose GPU manager prepares its workers at its start or for
the first GPU function that is deployed; the two take turns.
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.measure.process_usage import machine_processor_s, processor_s
from bench.measure.report import BenchReport, MeasurementFailed, load_average
from bench.recovery.running_stacks import RunningStack, SupervisedStack, running
from gpufaas.options.configuration import PREPARE_CHOICES

_HERE = Path(__file__).resolve().parents[1]
_REST_S = 8.0  # by then a manager that prepares at its start has a spare worker
# Each measurement begins when the rest of the machine uses less than this of one core, or then.
_QUIET_CORE, _LOOK_S, _LATEST_S = 0.3, 1.0, 40.0
# It is made again, so often at most, if others used more than this of one core meanwhile.
_MOST_OTHERS, _TRIES = 0.4, 4
_ANSWER_S, _PATIENCE_S, _PAUSE_S = 120.0, 180.0, 0.02
# Small, so that nothing but the start takes time.
_HANDLER = """
import os
{first}
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
model = model.eval().cuda()
def handle(event, context):
    from torch_shim.process_report import report
    with torch.no_grad():
        best = int(model(torch.ones(1, 64, device="cuda")).argmax())
    return {{"best": best, "graphs": report.counts.graph_calls}}
"""
_GPU = {"com.gpufaas.enabled": "true"}


class _Kind(NamedTuple):
    text: str
    annotations: dict[str, str]
    files: dict[str, str]
    first: str = ""  # of the handler


_KINDS = {
    "usual": _Kind("traced beside its calls", _GPU, {}),
    "waits": _Kind(
        "its first call waits for the trace",
        {**_GPU, "com.gpufaas.template": "false"},
        {},
        'os.environ["GPUFAAS_TRACING"] = "wait"',
    ),
    "example": _Kind("traced by example.json", _GPU, {"example.json": '{"body": ""}'}),
}


class _Moments(NamedTuple):
    """Seconds since the deployment was ordered, and those of the first call alone."""

    first_s: float
    from_gpu_s: float
    first_call_s: float


class _Sample(NamedTuple):
    others: float  # cores that everything but the stack and this bench used meanwhile
    moments: _Moments


def main() -> None:
    """Measure, print a table, and keep it if asked to."""
    parser = argparse.ArgumentParser(prog="bench.first_call", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of every kind and way (5)")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no round later (30)")
    parser.add_argument("--kind", action="append", choices=list(_KINDS), help="only this (all)")
    parser.add_argument("--keep", action="store_true", help="write to bench/results/ too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # it ends its stack
    command = " ".join(["python -m bench.first_call", *sys.argv[1:]])
    report = BenchReport("The first call of a stack's first GPU function", command)
    report.add(f"\nLoad average before: {load_average()}.")
    latest_s = time.monotonic() + 60.0 * options.minutes
    found: dict[tuple[str, str], list[_Sample]] = {}
    for number in range(options.rounds):
        if time.monotonic() < latest_s:
            _measure_round(number, options.kind or list(_KINDS), found)
    _show(report, found)
    if options.keep:
        print(report.keep("first-call"))


def _measure_round(
    number: int, kinds: list[str], found: dict[tuple[str, str], list[_Sample]]
) -> None:
    for kind in kinds:
        # Which of the two comes first changes from round to round.
        for prepare in PREPARE_CHOICES if number % 2 else reversed(PREPARE_CHOICES):
            sample = _undisturbed(_KINDS[kind], prepare)
            print(number, kind, prepare, sample, file=sys.stderr, flush=True)
            found.setdefault((kind, prepare), []).append(sample)


def _show(report: BenchReport, found: dict[tuple[str, str], list[_Sample]]) -> None:
    rounds = min(map(len, found.values()))
    report.add(
        f"\nA model of two layers on an emulated GPU, deployed {_REST_S:g} s or more after "
        f"`gpufaas up` is up, when the machine is quiet, or {_LATEST_S:g} s later all the same; "
        f"{len(os.sched_getaffinity(0))} cores. Medians of {rounds} rounds (least to most), in "
        f"which all take turns. What others disturbed, with more than {_MOST_OTHERS:g} of a core, "
        f"is measured again, {_TRIES} times in all at most, and the least disturbed counts.\n"
    )
    report.add(
        "| the function | workers prepared | first answer, s after the order | first answer from "
        "the GPU, s after the order | the first call alone, s |"
    )
    report.add("| --- | --- | ---: | ---: | ---: |")
    for kind, prepare in sorted(found):
        moments = [sample.moments for sample in found[kind, prepare]]
        columns = " | ".join(map(_shown, zip(*moments, strict=True)))
        report.add(f"| {_KINDS[kind].text} | {prepare} | {columns} |")
    others = [sample.others for samples in found.values() for sample in samples]
    report.add(
        f"\nOthers used {median(others):.2f} of a core meanwhile (at most {max(others):.2f}). "
        f"Load average after: {load_average()}."
    )


class _PreparedStack(SupervisedStack):
    emulated = ()

    def __init__(self, folder: Path, prepare: str) -> None:
        super().__init__(_HERE, folder)
        self._environment["GPUFAAS_NODE_PREPARE"] = prepare


@contextmanager
def _stack(prepare: str) -> Iterator[RunningStack]:
    with tempfile.TemporaryDirectory(prefix="first") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with running(_PreparedStack(folder, prepare)) as stack:
            yield stack


def _undisturbed(kind: _Kind, prepare: str) -> _Sample:
    """The first measurement that others left alone, or the one that they disturbed least."""
    samples: list[_Sample] = []
    while len(samples) < _TRIES and (not samples or samples[-1].others > _MOST_OTHERS):
        samples.append(_measured(kind, prepare))
    return min(samples)


def _measured(kind: _Kind, prepare: str) -> _Sample:
    with _stack(prepare) as stack:
        time.sleep(_REST_S)
        _until_quiet()
        before_s = machine_processor_s() - _own_s(stack)
        began_s = time.monotonic()
        stack.deploy("first", _HANDLER.format(first=kind.first), kind.annotations, kind.files)
        called_s = time.monotonic()
        graphs = _graphs(stack)
        answered_s = time.monotonic()
        while not graphs:
            if time.monotonic() > began_s + _PATIENCE_S:
                raise MeasurementFailed(f"no answer from the GPU within {_PATIENCE_S:g} s")
            time.sleep(_PAUSE_S)
            graphs = _graphs(stack)
        now_s = time.monotonic()
        others_s = machine_processor_s() - _own_s(stack) - before_s
    moments = _Moments(answered_s - began_s, now_s - began_s, answered_s - called_s)
    return _Sample(others_s / (now_s - began_s), moments)


def _own_s(stack: RunningStack) -> float:
    """Processor time of the stack and of this bench; what has ended meanwhile counts as others'."""
    total_s = time.process_time()
    for pid in stack.processes():
        with suppress(OSError):  # it has just ended
            total_s += processor_s(pid)
    return total_s


def _until_quiet() -> None:
    """Wait for others on this machine, but not for ever."""
    latest_s, used_s = time.monotonic() + _LATEST_S, math.inf
    while used_s > _QUIET_CORE * _LOOK_S and time.monotonic() < latest_s:
        before_s = machine_processor_s()
        time.sleep(_LOOK_S)
        used_s = machine_processor_s() - before_s


def _graphs(stack: RunningStack) -> int:
    """Call the function; how many calls of its model the GPU has answered so far."""
    address = f"{stack.url}/function/first"
    with urllib.request.urlopen(address, timeout=_ANSWER_S) as answer:
        return int(json.loads(answer.read())["graphs"])


def _shown(seconds: tuple[float, ...]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
