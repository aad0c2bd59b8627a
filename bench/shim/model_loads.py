"""Loads of weights: into a worker of the pool, and for switches between two models."""

from collections.abc import Iterator
from statistics import median

from bench.measure.comparisons import MS, ComparisonRow, Rounds
from bench.measure.function_orders import WIDE, FunctionOrder
from bench.measure.function_process import (
    Environment,
    FunctionProcess,
    function_process,
)
from bench.measure.report import (
    MeasurementFailed,
)
from bench.measure.worker_node import (
    WorkerNode,
    worker_node,
)

GIB, MIB = 1 << 30, 1 << 20
# An emulated GPU with room for one resnet50 before it is measured, and not for two after.
ONE_RESNET50_BYTES = 190 * MIB
# Leases end soon, so that a model can be evicted between two calls.
_LINGER_S = 0.05


def loads(environment: Environment, rounds: Rounds) -> Iterator[ComparisonRow]:
    """Rows about a load of 500 MB from the store into a worker of the pool."""
    with (
        worker_node(gpu_memory_bytes=2 * GIB, linger_s=_LINGER_S) as found,
        function_process(found.environment(environment, "wide", "wait"), shim=True) as ours,
    ):
        ours.ask(FunctionOrder(WIDE, warm=2))
        load_s, extra_s = zip(*(_load(found, ours, WIDE) for _ in range(rounds.count)), strict=True)
    yield ComparisonRow(
        "500 MB into a pooled worker: the load", median(load_s), MS, 0.150, rounds=[*load_s]
    )
    yield ComparisonRow(
        "its first call, beyond a warm one", median(extra_s), MS, None, rounds=[*extra_s]
    )


def switches(environment: Environment, rounds: Rounds) -> Iterator[ComparisonRow]:
    """Two resnet50s in turn on a GPU with room for one: each call evicts the other and loads."""
    with (
        worker_node(gpu_memory_bytes=ONE_RESNET50_BYTES) as found,
        function_process(found.environment(environment, "switch", "wait"), shim=True) as ours,
    ):
        for seed in (0, 1):
            ours.ask(FunctionOrder("resnet50", seed=seed, warm=2))
        before = found.evictions()
        extra_s, warm_s = [], []
        for number in range(2 * rounds.count):
            found.wait_for_worker()
            switched = ours.ask(FunctionOrder("resnet50", seed=number % 2)).seconds[0]
            warm_s.append(
                median(ours.ask(FunctionOrder("resnet50", seed=number % 2, calls=5)).seconds)
            )
            extra_s.append(switched - warm_s[-1])
        if found.evictions() - before < 2 * rounds.count:
            raise MeasurementFailed("both models had room: nothing was switched")
    yield ComparisonRow(
        "switch between two resnet50s, beyond a warm call",
        median(extra_s),
        MS,
        0.300,
        native=None,
        ours=median(warm_s) + median(extra_s),
        rounds=extra_s,
    )


def _load(found: WorkerNode, ours: FunctionProcess, model: str) -> tuple[float, float]:
    """Seconds of one load, by the worker's clock, and of the first call beyond a warm one."""
    found.evict_all()
    first_s = ours.ask(FunctionOrder(model)).seconds[0]
    (resident,) = found.on_gpus()
    warm_s = median(ours.ask(FunctionOrder(model, calls=5)).seconds)
    return resident.load_s, first_s - warm_s
