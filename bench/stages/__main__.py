"""`python -m bench.stages`: calls in each stage of staged exit, and memory over time.

The times of the emulated GPU are those of resnet50 in the SAGE paper (Table 4).
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.measure.drawn_pictures import draw_picture
from bench.measure.report import BenchReport, MeasurementFailed, load_average
from bench.recovery.running_stacks import RunningStack, SupervisedStack, running
from bench.stages.memory_samples import MemorySample

_HERE = Path(__file__).resolve().parents[2]
_PICTURE = "bench.stages.memory_picture"
_STAY_S = 2.5  # in each stage: long enough to see it, and to call in it
_WEIGHTS_BYTES, _CONTEXT_BYTES = 97_700_000, 414 << 20
_CONTEXT_S, _DISK_S, _PCIE_S, _COMPUTE_S = 0.2851, 0.0672, 0.0217, 0.0243
_FUNCTION, _PATIENCE_S, _PAUSE_S, _SAMPLE_S = "staged", 120.0, 0.02, 0.05
_HANDLER = f"""
import torch
torch.manual_seed(0)
class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding({_WEIGHTS_BYTES // 512}, 128)
        self.last = torch.nn.Linear(128, 4)
    def forward(self, numbers):
        return self.last(self.rows(numbers))
model = Table().eval().cuda()
def handle(event, context):
    from torch_shim.process_report import report
    with torch.no_grad():
        found = model(torch.arange(16, device="cuda"))
    return {{"sum": round(float(found.sum()), 3), "graphs": report.counts.graph_calls}}
"""


class StageCase(NamedTuple):
    """A stage to call in: what `gpufaas models` shows of it, and the paper's time."""

    name: str
    shown: frozenset[str]
    paper_s: float


_CASES = (
    StageCase("stage 1", frozenset({"gpu", "host"}), 0.0289),
    StageCase("stage 2", frozenset({"context", "host"}), 0.0497),
    StageCase("stage 3", frozenset({"host"}), 0.3095),
    StageCase("stage 4", frozenset({"disk"}), 0.3095),
    StageCase("gone", frozenset(), 0.3105),
)


class _Stack(SupervisedStack):
    def __init__(self, product: Path, folder: Path) -> None:
        super().__init__(product, folder)
        self.emulated = (
            *("--exit-rule", f"fixed:{_STAY_S:g}", "--spill", str(folder / "spill")),
            *("--emulate-run", f"{_COMPUTE_S}"),
            *("--emulate-disk", f"{_WEIGHTS_BYTES / _DISK_S:.0f}"),
            *("--emulate-pcie", f"{_WEIGHTS_BYTES / _PCIE_S:.0f}"),
            *("--emulate-context", f"{_CONTEXT_S}:{_CONTEXT_BYTES}"),
            *("--spare-contexts", "0"),  # SAGE has none
        )


def main() -> int:
    """Measure, print the table, draw memory over time."""
    parser = argparse.ArgumentParser(prog="bench.stages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of every stage (3)")
    parser.add_argument("--picture", type=Path, help="where to draw memory over time")
    parser.add_argument("--keep", action="store_true", help="write the table to bench/results/ too")
    options = parser.parse_args()
    report = BenchReport("Staged exit", " ".join(["python -m bench.stages", *sys.argv[1:]]))
    report.add(
        f"\nA call through gateway, function and worker in each stage; "
        f"{_WEIGHTS_BYTES / 1e6:.1f} MB of weights, {_STAY_S:g} s a stage. "
        f"Load average before: {load_average()}.\n"
    )
    with tempfile.TemporaryDirectory(prefix="stages") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with running(_Stack(_HERE, folder)) as stack:
            found, samples = _measured(stack, options.rounds)
    _show(report, found)
    if options.picture is not None:
        draw_picture(_PICTURE, options.picture, samples, _STAY_S)
    report.add(f"\nLoad average after: {load_average()}.")
    if options.keep:
        print(report.keep("stages"))
    return 0


# -- calls ----------------------------------------------------------------------------------------


def _measured(
    stack: RunningStack, rounds: int
) -> tuple[Mapping[str, list[float]], list[MemorySample]]:
    stack.deploy(_FUNCTION, _HANDLER, {"com.gpufaas.enabled": "true"})
    first = _call(stack)
    _until(lambda: _call(stack)["graphs"] > 1, "graphs answer")
    found: dict[str, list[float]] = {case.name: [] for case in _CASES}
    for _ in range(rounds):
        for case in _CASES:
            _call(stack)
            _until(lambda shown=case.shown: _shown(stack) == shown, case.name)
            began_s = time.monotonic()
            answer = _call(stack)
            found[case.name].append(time.monotonic() - began_s)
            if answer["sum"] != first["sum"]:
                raise MeasurementFailed(f"{case.name}: {answer} instead of {first}")
    with _sampled(stack) as samples:
        _call(stack)
        time.sleep((len(_CASES) + 0.6) * _STAY_S)
    return found, samples


def _call(stack: RunningStack) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.url}/function/{_FUNCTION}", b"", timeout=60.0) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def _shown(stack: RunningStack) -> frozenset[str]:
    """The stages of the function's one model; those that it has ended to be in do not count."""
    models = stack.models()
    return frozenset(rest["stage"] for model in models for rest in model["rests"])


def _until(happens: Any, what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not happens():
        if time.monotonic() > deadline_s:
            raise MeasurementFailed(f"not so within {_PATIENCE_S:g} s: {what}")
        time.sleep(_PAUSE_S)


# -- memory ---------------------------------------------------------------------------------------


@contextmanager
def _sampled(stack: RunningStack) -> Iterator[list[MemorySample]]:
    """Look at the memory again and again while the block runs."""
    samples: list[MemorySample] = []
    over, began_s = threading.Event(), time.monotonic()

    def look() -> None:
        while not over.wait(_SAMPLE_S):
            samples.append(_sample(stack, time.monotonic() - began_s))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield samples
    finally:
        over.set()
        looking.join()


def _sample(stack: RunningStack, at_s: float) -> MemorySample:
    (gpu, *_) = [gpu for gpu in stack.cluster()["gpus"] if gpu["used_bytes"]] or [None]
    stages = _shown(stack)
    models = 0 if gpu is None else sum(one["memory_bytes"] for one in gpu["residents"])
    contexts = 0 if gpu is None else sum(one["memory_bytes"] for one in gpu["contexts"])
    return MemorySample(
        at_s,
        models,
        contexts,
        _WEIGHTS_BYTES if "host" in stages else 0,
        _WEIGHTS_BYTES if "disk" in stages else 0,
    )


# -- results --------------------------------------------------------------------------------------


def _show(report: BenchReport, found: Mapping[str, Sequence[float]]) -> None:
    report.add("| call in | median ms | least | most | paper ms (Table 4) | distance |")
    report.add("| --- | ---: | ---: | ---: | ---: | ---: |")
    for case in _CASES:
        times = found[case.name]
        middle_s = median(times)
        report.add(
            f"| {case.name} | {1e3 * middle_s:.1f} | {1e3 * min(times):.1f} | "
            f"{1e3 * max(times):.1f} | {1e3 * case.paper_s:.1f} | "
            f"{100 * (middle_s / case.paper_s - 1):+.1f} % |"
        )


if __name__ == "__main__":
    sys.exit(main())
