"""`python -m bench.gpu`: everything that only a GPU can answer, in parts, within 25 minutes.

`make gpu` runs it where there may be no .venv and no network (`bench.gpu.kit`). Parts that are
done are not run again, so that it can be called with less time (`--within 470`) until all are done.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from bench.gpu.part_log import PartLog
from bench.gpu.part_process import PartProcess
from bench.gpu.results_file import ResultsFile, Row
from bench.measure.report import RESULTS
from cache_manager.model.ids import NodeId
from gpu_manager.errors import BadSetting, NoDriver
from gpu_manager.node.host_gpus import choose_devices

WITHIN_S = 1500.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part: the seconds after which it is stopped, and those that it is worth beginning for."""

    name: str
    limit_s: float
    least_s: float
    about: str
    needs_calls: bool = False  # of which `smoke` has to have seen one
    uses_node: bool = False  # which it hands on to the next part, if that uses one
    goes_on: bool = False  # from the rows that it has, should it not be done


def _with_node(name: str, limit_s: float, least_s: float, about: str, **more: bool) -> Part:
    return Part(name, limit_s, least_s, about, needs_calls=True, uses_node=True, **more)


# In order of worth, and of what depends on what. Their limits sum up to WITHIN_S.
SMOKE = "smoke"
PARTS = (
    Part("facts", 50, 10, "what this machine has, and what NVML says of the GPU"),
    Part(SMOKE, 160, 20, "a worker is forked, a call goes through everything"),
    Part("tests", 200, 30, "tests/gpu, a process a file"),
    Part("copies", 45, 15, "ways to copy weights to the GPU"),
    _with_node("memory", 75, 30, "memory per worker by ledger and driver"),
    _with_node("cold", 170, 45, "first answers by stage: resnet50, vgg19, 7 B of layers"),
    _with_node("warm", 180, 60, "warm calls beside eager calls and CUDA graphs"),
    Part("suspend", 90, 30, "processes suspended by the driver's checkpoint API"),
    Part("programs", 150, 90, "twenty programs by themselves and under exec", needs_calls=True),
    _with_node("profile", 200, 40, "the 22 models of Table 1, for the simulator", goes_on=True),
    Part("workload", 180, 120, "the thesis's workload through a whole stack", needs_calls=True),
)


class RunsParts(Protocol):
    """A process of parts, or what stands in for one in tests."""

    @property
    def ended(self) -> bool:
        """Whether it can run no further part."""
        ...

    def run(
        self, name: str, limit_s: float, add: Callable[[Row], None], log: Callable[[str], None]
    ) -> str:
        """Run a part; return what failed."""
        ...

    def close(self) -> None:
        """Have it clean up and end."""
        ...

    def kill(self) -> None:
        """End it soon."""
        ...


StartProcess = Callable[[Sequence[str], Mapping[str, str]], RunsParts]


def main(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    start_process: StartProcess = PartProcess,
) -> int:
    """Run the parts that are not done; 0 when all are, else 1 with a word on each that is not."""
    options = _parser(environment).parse_args(arguments)
    devices = "cpu:1" if options.emulate else options.devices
    try:
        gpu_type = _gpu_type(devices, environment.get("CUDA_VISIBLE_DEVICES"))
    except (NoDriver, BadSetting) as error:
        print(f"bench.gpu: {error}; --emulate tries the parts without a GPU", file=sys.stderr)
        return 1
    results = ResultsFile(options.output, gpu_type, () if options.emulate else (RESULTS,))
    command = [sys.executable, "-m", "bench.gpu.part", "--devices", devices]
    command += ["--gpu-type", gpu_type, "--output", str(options.output)]
    told = {**environment, "GPUFAAS_WORKER_STDERR": "1"}  # for the log
    with _Run(results, partial(start_process, command, told), options) as run:
        for part in PARTS:
            if part.name in options.only:
                run.add(part)
    return run.verdict()


class _Run:
    """The parts of one command, one after the other, while time is left."""

    def __init__(
        self,
        results: ResultsFile,
        start_process: Callable[[], RunsParts],
        options: argparse.Namespace,
    ) -> None:
        self._results = results
        self._start_process = start_process
        self._again: bool = options.again
        self._scale: float = options.scale
        self._deadline_s = time.monotonic() + options.within
        self._process: RunsParts | None = None
        self._not_run: dict[str, str] = {}
        self._asked: list[str] = []
        self._without_calls = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._process is not None:
            self._process.kill()  # this process has been told to end
        self.close()

    def add(self, part: Part) -> None:
        """Run a part, unless it is done, too little time is left, or it would have no calls."""
        name = part.name
        self._asked.append(name)
        left_s = self._deadline_s - time.monotonic()
        # What others rely on is looked at again: this may be another machine.
        if self._results.done(name) and not self._again and name != SMOKE:
            print(f"{name}: done before", flush=True)
        elif part.needs_calls and self._without_calls:
            self._not_run[name] = f"{SMOKE} has failed"
        elif left_s < part.least_s * self._scale:
            self._not_run[name] = "too little time is left; run this again"
        else:
            failed = self._run(part, min(part.limit_s * self._scale, left_s))
            self._without_calls |= name == SMOKE and bool(failed)

    def close(self) -> None:
        """End the process of the last part."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def verdict(self) -> int:
        """What is not done, and why; the file with the rest."""
        print()
        for name in self._asked:
            if name in self._not_run:
                print(f"{name}: NOT RUN, {self._not_run[name]}")
            elif not self._results.done(name):
                print(f"{name}: FAILED: {self._results.parts[name].failed}")
        print(self._results.path)
        return 0 if all(map(self._results.done, self._asked)) else 1

    def _run(self, part: Part, limit_s: float) -> str:
        name, results = part.name, self._results
        print(f"\n{name}: {part.about}; at most {limit_s:.0f} s", flush=True)
        results.begin(name, goes_on=part.goes_on and not self._again)
        log = PartLog(results.path.with_suffix(".log"), f"{name}, {results.parts[name].began}")
        if not part.uses_node:
            self.close()  # a node that other parts have used
        began_s = time.monotonic()
        with closing(log):
            process = self._process = self._process or self._start_process()
            failed = process.run(name, limit_s, partial(results.add, name), log.add)
        if process.ended or not part.uses_node:
            self.close()
        results.end(name, time.monotonic() - began_s, failed)
        print(f"{name}: {failed or 'done'}", flush=True)
        return failed


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    add = parser.add_argument
    add("--devices", default="cuda:0", help="the one GPU to use (cuda:0)")
    add("--emulate", action="store_true", help="an emulated GPU and small models: tries the parts")
    names = [part.name for part in PARTS]
    add("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    add("--again", action="store_true", help="run parts that are done too")
    add("--within", type=float, default=WITHIN_S, help="seconds, in which the last part is stopped")
    add("--scale", type=float, default=1.0, help="multiplies the limit of every part (1)")
    out = environment.get("OUT")
    add("--output", type=Path, default=Path(out) if out else RESULTS, help="$OUT, bench/results")
    return parser


def _gpu_type(devices: str, visible: str | None) -> str:
    """The first word of the GPU's name (`h200`); `emulated` where it is."""
    found = choose_devices(
        devices, NodeId("bench"), 1 << 30 if devices == "cpu:1" else None, visible
    )
    try:
        return found[0].gpu_type.split("-")[0]
    finally:
        for device in found:
            device.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part under way ends, too
    sys.exit(main(sys.argv[1:], dict(os.environ)))
