"""`python -m bench.recovery`: kill and freeze each process of a stack under light load.

Another checkout is measured from outside with `--product DIR`.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench.measure.report import BenchReport, MeasurementFailed, load_average
from bench.recovery.rounds import Fault, RoundFigures, measure_round
from bench.recovery.running_stacks import PairedStack, RunningStack, SupervisedStack, running
from bench.recovery.steady_callers import SteadyCallers
from tests.kit.processes.terminated import end_by_exception

_HERE = Path(__file__).resolve().parents[2]
_LOOK_S = 2.0
_PLAIN, _GPU = "plain", "gpu"
_FUNCTIONS = (_PLAIN, _GPU)
_HANDLERS = {
    _PLAIN: "def handle(event, context):\n    return 'plain'\n",
    # It works by itself first: meanwhile nobody has claimed the lease that came with the call.
    _GPU: """
import time
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
model = model.eval().cuda()
def handle(event, context):
    time.sleep(0.15)
    with torch.no_grad():
        return {"device": str(model(torch.ones(1, 64, device="cuda")).device)}
""",
}
_SUPERVISED = (
    *("gateway", "scheduler", "GPU manager", "fork server", "worker", "instance of plain"),
    *("instance of gpu", "etcd"),
)
_PAIRED = ("leading scheduler of two",)
_EVENTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


def main() -> int:
    """Measure, print a table, and write the figures."""
    options = _options()
    end_by_exception()
    command = " ".join(["python -m bench.recovery", *sys.argv[1:]])
    report = BenchReport("What callers notice of a lost process", command)
    report.add(
        f"\nProduct: {options.product}. Every 0.25 s a call of a plain and one of a GPU function "
        f"begin; two emulated GPUs, a run takes 0.2 s. Load average before: {load_average()}.\n"
    )
    found: list[RoundFigures] = []
    for kind, parts in ((SupervisedStack, _SUPERVISED), (PairedStack, _PAIRED)):
        wanted = [part for part in parts if not options.part or part in options.part]
        if wanted:
            found += _measured(kind, options, wanted)
    _show(report, found)
    report.add(f"\nLoad average after: {load_average()}.")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if options.keep:
        print(report.keep("recovery"))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.recovery", description=__doc__)
    add = parser.add_argument
    add("--product", type=Path, default=_HERE, help="the checkout that runs (this one)")
    add("--rounds", type=int, default=1, help="of every fault (1)")
    add("--part", action="append", choices=[*_SUPERVISED, *_PAIRED], help="only this (all)")
    add("--event", action="append", choices=list(_EVENTS), help="only this (both)")
    add("--json", type=Path, metavar="FILE", help="write the figures of every round there")
    add("--keep", action="store_true", help="write the table to bench/results/ too")
    return parser.parse_args()


def _measured(
    kind: type[RunningStack], options: argparse.Namespace, parts: Sequence[str]
) -> list[RoundFigures]:
    found = []
    with _stack(kind, options.product.resolve()) as stack:
        for name, handler in _HANDLERS.items():
            enabled = "true" if name == _GPU else "false"
            stack.deploy(name, handler, {"com.gpufaas.enabled": enabled})
        with SteadyCallers(stack.url, _FUNCTIONS) as callers:
            _until_on_gpu(stack)
            for _ in range(options.rounds):
                for part in parts:
                    faults = [Fault(part, _EVENTS[name]) for name in options.event or _EVENTS]
                    found += [_round(stack, callers, fault) for fault in faults]
    return found


def _round(stack: RunningStack, callers: SteadyCallers, fault: Fault) -> RoundFigures:
    try:
        figures = measure_round(stack, callers, _FUNCTIONS, fault)
    except MeasurementFailed as error:
        raise MeasurementFailed(f"{fault.text} of {fault.part}: {error}") from error
    print(json.dumps(asdict(figures)), file=sys.stderr, flush=True)
    return figures


def _until_on_gpu(stack: RunningStack) -> None:
    """Wait until calls of the GPU function are placed before they begin: its models are known."""

    def placed() -> bool:
        before = stack.cluster()
        time.sleep(_LOOK_S)
        after = stack.cluster()
        return bool(after["hits"] - before["hits"] > _LOOK_S)

    stack.until(placed, "calls are placed on GPUs")


@contextmanager
def _stack(kind: type[RunningStack], product: Path) -> Iterator[RunningStack]:
    with tempfile.TemporaryDirectory(prefix="recovery") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with running(kind(product, folder)) as stack:
            yield stack


def _show(report: BenchReport, found: Sequence[RoundFigures]) -> None:
    report.add(
        "Seconds until the first good answer of a call that began after the fault, the longest "
        "time without a good answer, failed calls, and how long a GPU was shown under a lease "
        "of before it. Medians of the rounds; `-`: not within the round.\n"
    )
    names = " | ".join(f"{name}: first | gap | failed" for name in _FUNCTIONS)
    report.add(f"| part | fault | {names} | GPU busy |")
    report.add("| --- | --- |" + " ---: |" * (3 * len(_FUNCTIONS) + 1))
    for part, fault in dict.fromkeys((one.part, one.fault) for one in found):
        rounds = [one for one in found if (one.part, one.fault) == (part, fault)]
        cells = []
        for name in _FUNCTIONS:
            cells += [_middle([one.first_s[name] for one in rounds])]
            cells += [_middle([one.gap_s[name] for one in rounds])]
            cells += [f"{median(one.failed[name] for one in rounds):g}"]
        cells += [_middle([one.busy_s for one in rounds])]
        report.add(f"| {part} | {fault} | {' | '.join(cells)} |")


def _middle(found: Sequence[float | None]) -> str:
    known = [one for one in found if one is not None]
    return f"{median(known):.2f}" if len(known) == len(found) else "-"


if __name__ == "__main__":
    sys.exit(main())
