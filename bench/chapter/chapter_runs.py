"""One policy under the load of chapter 5: through the whole stack, and in the simulator."""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench.chapter.chapter_functions import (
    GPU_MEMORY_BYTES,
    SMALLER,
    EmulatedLine,
    addresses,
    deployments,
    write_build,
)
from bench.gateway.bench_stacks import call_until_leased
from bench.load.http_callers import target_at
from bench.load.load_run import LoadOutcome, TrafficPlan, run
from bench.load.statistics import CacheCounts
from bench.measure.load_figures import http_post
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import StackNotReady, WholeStack, whole_stack
from cache_manager.model.ids import ModelId
from scheduler.composition import make_core
from scheduler.sim import workload
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.workload import Pattern, Workload

GPUS = 12
_RATE = 325
_ALONE_CALLS = 15
_LONGEST_S = 3600.0
# What a model may need more or less than Table 1's memory, scaled.
_MOST_APART_BYTES = GPU_MEMORY_BYTES // 200
_MEASURED_S, _ASK_S = 240.0, 0.2


@dataclass(frozen=True, slots=True)
class ChapterFigures:
    """What a run shows, in the thesis's seconds.

    `miss_ratio` is over requests. Live a request can have more than one lease, as when its function
    comes too late for the first: `leases` is how many each had. `late_s` says how well the
    generator kept up.
    """

    average_s: float
    miss_ratio: float
    last_s: float
    leases: float = 1.0
    failed: int = 0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WarmChapter:
    """A stack whose functions have traced their models; everything is `speed` times as fast.

    A call alone, whose model is on a GPU, takes `overhead_s` longer than its run, in the thesis's
    seconds.
    """

    stack: WholeStack
    load: Workload
    functions: tuple[str, ...]  # of the load's models, in their order
    speed: float
    overhead_s: float


def chapter_load(working_set: int, minutes: int, seed: int, line: EmulatedLine) -> Workload:
    """Section 5.1's requests, of models with the times of this line."""
    found = workload.thesis(working_set, _RATE, minutes, Pattern(), seed)
    return Workload(tuple(line.of(model) for model in found.models), found.arrivals)


@contextmanager
def warm_chapter(
    load: Workload, line: EmulatedLine, speed: float, namespaces: Sequence[str] = ()
) -> Iterator[WarmChapter]:
    """`gpufaas up` with twelve emulated GPUs, and a function for each model of the load.

    Each function is in the namespace with its model's number, or all are in the default one.
    """
    options = ("--devices", f"cpu:{GPUS}", "--gpu-memory", str(GPU_MEMORY_BYTES))
    functions = addresses(len(load.models), namespaces)
    with tempfile.TemporaryDirectory(prefix="chapter") as name:
        root = Path(name)
        root.chmod(0o755)  # functions are other users
        write_build(root / "build")
        with whole_stack(root, (*options, *line.options(speed))) as stack:
            for namespace in sorted(set(namespaces)):
                stack.add_namespace(namespace)
            for deployment in deployments(load.models, namespaces):
                stack.deploy(deployment)
            for function in functions:
                stack.ready(function)
                call_until_leased(stack, function, b"")
            _check_sizes(stack, load, functions)
            overhead_s = speed * _alone_s(stack, functions[0]) - line.run_s
            yield WarmChapter(stack, load, functions, speed, overhead_s)


def live(chapter: WarmChapter, policy: str) -> ChapterFigures:
    """The load through the stack, whose GPUs are empty at first."""
    speed, arrivals = chapter.speed, chapter.load.arrivals
    outcome, counted = called(chapter, policy, arrivals)
    found = outcome.tally.figures()
    if found.latency is None:
        raise MeasurementFailed(f"{policy}: no call was answered: {found.statuses}")
    return ChapterFigures(
        average_s=speed * found.latency.average_s,
        miss_ratio=counted.misses / len(arrivals),
        last_s=speed * outcome.elapsed_s,
        leases=(counted.hits + counted.misses) / len(arrivals),
        failed=found.calls - found.succeeded,
        late_s=percentile(sorted(outcome.late_s), 0.99),
    )


def called(
    chapter: WarmChapter, policy: str, arrivals: Sequence[tuple[float, ModelId]]
) -> tuple[LoadOutcome, CacheCounts]:
    """These requests through the stack; its own times, and what the scheduler counted."""
    stack = chapter.stack
    stack.set_policy(policy)
    stack.evict_all()
    numbers = {model.id: number for number, model in enumerate(chapter.load.models)}
    before = stack.cache()
    plan = TrafficPlan(
        target=target_at(stack.url),
        functions=chapter.functions,
        requests=[http_post(f"/function/{function}") for function in chapter.functions],
        seconds=_LONGEST_S,
        timeout_s=_LONGEST_S,
        arrivals=[(at_s / chapter.speed, numbers[model]) for at_s, model in arrivals],
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(run(plan, asyncio.Event(), lambda _outcome, _in_flight: None))
    return outcome, stack.cache().since(before)


def simulated(chapter: WarmChapter, policy: str) -> ChapterFigures:
    """The same load in the simulator, whose requests have the overhead of a call alone."""
    hardware = Hardware(gpus=GPUS, overhead_s=max(0.0, chapter.overhead_s))
    summary = Engine(make_core(policy), hardware, chapter.load).run().tally.summary()
    return ChapterFigures(summary.avg_latency_s, summary.miss_ratio, summary.makespan_s)


def _alone_s(stack: WholeStack, function: str) -> float:
    """How long a call takes whose model is on a GPU, while there is no other."""
    took_s = []
    for _ in range(_ALONE_CALLS):
        begun_s = time.perf_counter()
        stack.call(function, b"")
        took_s.append(time.perf_counter() - begun_s)
    return median(took_s)


def _check_sizes(stack: WholeStack, load: Workload, functions: Sequence[str]) -> None:
    """Call every function until its model's measured memory is that of Table 1, scaled, or nearly.

    The first run in a process takes more than all others, which the second measurement corrects.
    """
    wanted = sorted(model.memory_bytes // SMALLER for model in load.models)
    patience_s = time.monotonic() + _MEASURED_S
    while True:
        sizes = sorted(model["memory_bytes"] for model in stack.scheduler.get("/models"))
        if len(sizes) == len(wanted):
            apart = [abs(ours - theirs) for ours, theirs in zip(sizes, wanted, strict=True)]
            if max(apart) <= _MOST_APART_BYTES:
                return
        if time.monotonic() > patience_s:
            raise StackNotReady(f"models of {sizes} bytes, not {wanted}")
        for function in functions:
            stack.call(function, b"")
        time.sleep(_ASK_S)
