"""Weights on their way to a GPU: a load into a pooled worker, and switches between two models."""

from collections.abc import Iterator
from statistics import median

from bench.shim_node import Child, Environment, Failed, Node, child, node
from bench.shim_orders import WIDE, Order
from bench.shim_rows import MS, Rounds, Row

GIB, MIB = 1 << 30, 1 << 20
# Of an emulated GPU: room for one resnet50 before it is measured, and not for two after.
ONE_RESNET50_BYTES = 190 * MIB
# Leases end soon, so that a model can be evicted between two calls.
_LINGER_S = 0.05


def loads(environment: Environment, rounds: Rounds) -> Iterator[Row]:
    """500 MB from the store into a worker that waits for a model."""
    with (
        node(gpu_memory_bytes=2 * GIB, linger_s=_LINGER_S) as found,
        child(found.environment(environment, "wide", "wait"), shim=True) as ours,
    ):
        ours.ask(Order(WIDE, warm=2))
        load_s, extra_s = zip(*(_load(found, ours, WIDE) for _ in range(rounds.count)), strict=True)
    yield Row("500 MB into a pooled worker: the load", median(load_s), MS, 0.150, rounds=[*load_s])
    yield Row("its first call, beyond a warm one", median(extra_s), MS, None, rounds=[*extra_s])


def switches(environment: Environment, rounds: Rounds) -> Iterator[Row]:
    """Two resnet50s in turn where one has room: each call evicts the other one's and loads."""
    with (
        node(gpu_memory_bytes=ONE_RESNET50_BYTES) as found,
        child(found.environment(environment, "switch", "wait"), shim=True) as ours,
    ):
        for seed in (0, 1):
            ours.ask(Order("resnet50", seed=seed, warm=2))
        before = found.evictions()
        extra_s, warm_s = [], []
        for number in range(2 * rounds.count):
            found.wait_for_worker()
            switched = ours.ask(Order("resnet50", seed=number % 2)).seconds[0]
            warm_s.append(median(ours.ask(Order("resnet50", seed=number % 2, calls=5)).seconds))
            extra_s.append(switched - warm_s[-1])
        if found.evictions() - before < 2 * rounds.count:
            raise Failed("both models had room: nothing was switched")
    yield Row(
        "switch between two resnet50s, beyond a warm call",
        median(extra_s),
        MS,
        0.300,
        native=None,
        ours=median(warm_s) + median(extra_s),
        rounds=extra_s,
    )


def _load(found: Node, ours: Child, model: str) -> tuple[float, float]:
    """Seconds of one load, as the worker says, and of the first call beyond a warm one."""
    found.evict_all()
    first_s = ours.ask(Order(model)).seconds[0]
    (resident,) = found.on_gpus()
    warm_s = median(ours.ask(Order(model, calls=5)).seconds)
    return resident.load_s, first_s - warm_s
