"""`python -m bench.gpu`: everything that only a GPU can answer, in parts, within 25 minutes.

`make gpu` runs it where there may be no .venv and no network (`bench.gpu.kit`). Parts that are
done are not run again, so that it can be called with less time (`--within 570`) until all are done.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gpu.part_process import run_part
from bench.gpu.results_file import ResultsFile, Row
from bench.measure.report import RESULTS
from cache_manager.model.ids import NodeId
from gpu_manager.devices.device_choice import choose
from gpu_manager.errors import NoDriver, NoSuchDevice

WITHIN_S = 1500.0
# What each part needs to come to its end by itself, before it is stopped.
_REST_S = 10.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part, and the seconds after which it is stopped."""

    name: str
    limit_s: float
    about: str


# In order of worth. Their limits sum up to less than WITHIN_S.
PARTS = (
    Part("facts", 60, "what this machine has, and what NVML says of the GPU"),
    Part("tests", 150, "tests/gpu"),
    Part("programs", 240, "twenty programs by themselves and under `gpufaas exec`"),
    Part("cold", 220, "first answers by stage: resnet50, vgg19, a stack of layers of 7 B"),
    Part("warm", 190, "warm calls beside native eager calls and native CUDA graphs"),
    Part("memory", 90, "memory per worker, as the ledger has it and as the driver has it"),
    Part("copies", 50, "ways to copy weights to the GPU"),
    Part("profile", 260, "load, run and peak of the 22 models of Table 1, for the simulator"),
    Part("workload", 200, "the thesis's workload on one GPU, through a whole stack"),
)


RunPart = Callable[
    [Sequence[str], Mapping[str, str], float, Callable[[Row], None]], str
]  # the command, its environment, its limit, and who takes its rows; what failed


def main(
    arguments: Sequence[str], environment: Mapping[str, str], run_part: RunPart = run_part
) -> int:
    """Run the parts that are not done; 0 when all are, else 1 with a word on each that is not."""
    options = _parser(environment).parse_args(arguments)
    devices = "cpu:1" if options.emulate else options.devices
    try:
        gpu_type = _gpu_type(devices, environment.get("CUDA_VISIBLE_DEVICES"))
    except (NoDriver, NoSuchDevice) as error:
        print(f"bench.gpu: {error}; --emulate tries the parts without a GPU", file=sys.stderr)
        return 1
    results = ResultsFile(options.output, gpu_type, () if options.emulate else (RESULTS,))
    deadline_s = time.monotonic() + options.within
    unbegun = []
    for part in _chosen(options.only):
        if results.done(part.name) and not options.again:
            print(f"{part.name}: done before", flush=True)
        elif time.monotonic() + part.limit_s * options.scale > deadline_s:
            unbegun.append(part.name)
        else:
            command = _command(part, results, devices, options)
            limit_s = part.limit_s * options.scale
            print(f"\n{part.name}: {part.about}; at most {limit_s:.0f} s", flush=True)
            results.begin(part.name)
            began_s = time.monotonic()
            failed = run_part(command, environment, limit_s, partial(results.add, part.name))
            results.end(part.name, time.monotonic() - began_s, failed)
            print(f"{part.name}: {failed or 'done'}", flush=True)
    return _verdict(results, options.only, unbegun)


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    add = parser.add_argument
    add("--devices", default="cuda:0", help="the one GPU to use (cuda:0)")
    add("--emulate", action="store_true", help="an emulated GPU and small models: tries the parts")
    names = [part.name for part in PARTS]
    add("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    add("--again", action="store_true", help="run parts that are done too")
    add("--within", type=float, default=WITHIN_S, help="seconds; no part begins that may take more")
    add("--scale", type=float, default=1.0, help="multiplies the limit of every part (1)")
    out = environment.get("OUT")
    add("--output", type=Path, default=Path(out) if out else RESULTS, help="$OUT, bench/results")
    return parser


def _chosen(only: Sequence[str]) -> Iterator[Part]:
    return (part for part in PARTS if part.name in only)


def _gpu_type(devices: str, visible: str | None) -> str:
    """The first word of the GPU's name (`h200`); `emulated` where it is."""
    found = choose(devices, NodeId("bench"), 1 << 30 if devices == "cpu:1" else None, visible)
    try:
        return found[0].gpu_type.split("-")[0]
    finally:
        for device in found:
            device.close()


def _command(
    part: Part, results: ResultsFile, devices: str, options: argparse.Namespace
) -> list[str]:
    within_s = max(1.0, (part.limit_s - _REST_S) * options.scale)
    command = [sys.executable, "-m", "bench.gpu.part", part.name, "--devices", devices]
    command += ["--within", str(within_s), "--gpu-type", results.gpu_type]
    return [*command, "--output", str(options.output)]


def _verdict(results: ResultsFile, only: Sequence[str], unbegun: Sequence[str]) -> int:
    """What is not done, and why; the file with the rest."""
    print()
    for part in _chosen(only):
        if part.name in unbegun:
            print(f"{part.name}: NOT RUN, too little time is left; run this again")
        elif not results.done(part.name):
            print(f"{part.name}: FAILED: {results.parts[part.name].failed}")
    print(results.path)
    return 0 if all(results.done(part.name) for part in _chosen(only)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
