"""`python -m bench.wake`: wake functions from zero and add replicas, with and without templates.

All kinds of function run in one stack with emulated GPUs and take turns, so that the machine's
other load meets them alike.
"""

import argparse
import json
import math
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.measure.report import BenchReport, MeasurementFailed, load_average
from bench.recovery.running_stacks import RunningStack, SupervisedStack, running

_HERE = Path(__file__).resolve().parents[2]
_ANSWER_S, _PATIENCE_S, _PAUSE_S = 120.0, 180.0, 0.02
_QUIET_S, _QUIET_TICKS = 2.0, 10
_REST_S = 3.0  # before each measurement: nobody orders replicas all the time
_HANDLER = """
import torch, torchvision
torch.manual_seed(0)
model = torchvision.models.resnet50().eval().cuda()
def handle(event, context):
    from torch_shim.process_report import report
    if event.query.get("not") == context.hostname:
        return {"host": context.hostname}
    with torch.no_grad():
        best = int(model(torch.zeros(1, 3, 224, 224, device="cuda")).argmax())
    return {"best": best, "graphs": report.counts.graph_calls, "host": context.hostname}
"""
_EXAMPLE = {"example.json": '{"body": ""}'}


class Kind(NamedTuple):
    """A function of the bench, and what it is for."""

    name: str
    text: str
    annotations: dict[str, str]
    files: dict[str, str]


_GPU = {"com.gpufaas.enabled": "true"}
_KINDS = (
    Kind("anew", "started anew", {**_GPU, "com.gpufaas.template": "false"}, {}),
    Kind("imported", "template without examples", _GPU, {}),
    Kind("warm", "template with example.json", _GPU, _EXAMPLE),
)


class Figures(NamedTuple):
    """Seconds until the first answer, until the first from a GPU, and of the call after that."""

    first_s: float
    from_gpu_s: float
    again_s: float


_UNKNOWN = Figures(math.nan, math.nan, math.nan)


def main() -> int:
    """Measure, print a table, and keep it if asked to."""
    options = _options()
    signal.signal(signal.SIGTERM, _end)
    report = BenchReport("The first answer", " ".join(["python -m bench.wake", *sys.argv[1:]]))
    report.add(
        f"\nresnet50, 224 x 224, on an emulated GPU; medians of {options.rounds} rounds, in which "
        f"the kinds take turns. Load average before: {load_average()}.\n"
    )
    with _stack(options.product.resolve()) as stack:
        kinds = [kind for kind in _KINDS if kind.name in (options.kind or kind.name)]
        found = _measured(stack, kinds, options.rounds)
    _show(report, found)
    report.add(f"\nLoad average after: {load_average()}.")
    if options.keep:
        print(report.keep("wake"))
    return 0


def _end(*_: object) -> None:
    """End by an exception, so that every process that was started is ended, and only once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.wake", description=__doc__)
    parser.add_argument("--product", type=Path, default=_HERE, help="the checkout that runs")
    parser.add_argument("--rounds", type=int, default=3, help="of every kind (3)")
    kinds = [kind.name for kind in _KINDS]
    parser.add_argument("--kind", action="append", choices=kinds, help="only this (all)")
    parser.add_argument("--keep", action="store_true", help="write the table to bench/results/ too")
    return parser.parse_args()


class _Stack(SupervisedStack):
    emulated = ()


@contextmanager
def _stack(product: Path) -> Iterator[RunningStack]:
    with tempfile.TemporaryDirectory(prefix="wake") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with running(_Stack(product, folder)) as stack:
            yield stack


def _measured(
    stack: RunningStack, kinds: Sequence[Kind], rounds: int
) -> dict[tuple[str, str], list[Figures]]:
    found: dict[tuple[str, str], list[Figures]] = {}
    for kind in kinds:
        stack.deploy(kind.name, _HANDLER, kind.annotations, kind.files)
        _until(lambda name=kind.name: _call(stack, name)["graphs"] > 0, "a graph answers")  # type: ignore[misc]  # mypy infers no lambda with a default
        stack.scale(kind.name, 0)
    _settle(stack)
    for number in range(rounds):
        for kind in kinds:
            for what, measure in (("from zero", _woken), ("second replica", _doubled)):
                time.sleep(_REST_S)
                figures = measure(stack, kind.name)
                print(number, kind.name, what, figures, file=sys.stderr, flush=True)
                found.setdefault((kind.name, what), []).append(figures)
            stack.scale(kind.name, 0)
            stack.until(lambda name=kind.name: not stack.ready(name), "it has no replica")  # type: ignore[misc]  # see above
    return found


def _settle(stack: RunningStack) -> None:
    """Wait until no process starts or makes its example calls any more."""

    def used_ticks() -> int:
        return sum(
            sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            for pid in stack.matching("gateway_ext/runtime")
        )

    quiet = False
    while not quiet:
        before = used_ticks()
        time.sleep(_QUIET_S)
        quiet = used_ticks() - before < _QUIET_TICKS


def _woken(stack: RunningStack, name: str) -> Figures:
    """From the first call of a function without replicas."""
    return _answered(stack, name, time.monotonic())


def _doubled(stack: RunningStack, name: str) -> Figures:
    """From the order of a second replica, while the first one is asked for nothing but its name."""
    first = _call(stack, name)["host"]
    began_s = time.monotonic()
    stack.scale(name, 2)
    return _answered(stack, name, began_s, without=first)


def _answered(stack: RunningStack, name: str, began_s: float, without: str = "") -> Figures:
    first_s = gpu_s = math.nan
    while time.monotonic() < began_s + _PATIENCE_S:
        asked_s = time.monotonic()
        answer = _call(stack, name, without)
        if answer["host"] == without:
            time.sleep(_PAUSE_S)
            continue
        now_s = time.monotonic() - began_s
        first_s = now_s if math.isnan(first_s) else first_s
        gpu_s = now_s if answer["graphs"] == 1 else gpu_s
        if answer["graphs"] > 1:
            return Figures(first_s, gpu_s, time.monotonic() - asked_s)
    raise MeasurementFailed(f"{name}: no answer from a GPU within {_PATIENCE_S:g} s")


def _call(stack: RunningStack, name: str, without: str = "") -> dict[str, Any]:
    address = f"{stack.url}/function/{name}?not={without}"
    with urllib.request.urlopen(address, timeout=_ANSWER_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def _until(happens: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not happens():
        if time.monotonic() > deadline_s:
            raise MeasurementFailed(f"not so within {_PATIENCE_S:g} s: {what}")
        time.sleep(_PAUSE_S)


def _show(report: BenchReport, found: dict[tuple[str, str], list[Figures]]) -> None:
    report.add(
        "| | from | first answer, s | first answer from the GPU, s | the next call, s | of anew |"
    )
    report.add("| --- | --- | ---: | ---: | ---: | ---: |")
    for what in ("from zero", "second replica"):
        anew_s = median(one.from_gpu_s for one in found.get(("anew", what), [_UNKNOWN]))
        for kind in _KINDS:
            if (kind.name, what) not in found:
                continue
            figures = found[kind.name, what]
            first_s = median(one.first_s for one in figures)
            gpu_s = median(one.from_gpu_s for one in figures)
            again_s = median(one.again_s for one in figures)
            share = "" if math.isnan(anew_s) else f"{100 * gpu_s / anew_s:.0f} %"
            seconds = f"{first_s:.2f} | {gpu_s:.2f} | {again_s:.2f}"
            report.add(f"| {kind.text} | {what} | {seconds} | {share} |")


if __name__ == "__main__":
    sys.exit(main())
