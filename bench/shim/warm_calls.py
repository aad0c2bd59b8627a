"""Warm calls, native against ours: their cost, large inputs, and how many a second."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from bench.measure.comparisons import (
    MS,
    RATE,
    RATIO,
    US,
    ComparisonRow,
    Rounds,
    alternate,
    compared,
    extra,
    ratio,
)
from bench.measure.function_orders import LINEAR, PIXELS, FunctionOrder, OrderResult
from bench.measure.function_process import (
    Environment,
    FunctionProcess,
    function_process,
)
from bench.measure.worker_node import (
    WorkerNode,
    worker_node,
)

GIB = 1 << 30
THREADS = (1, 4, 16)

_LINEAR = FunctionOrder(LINEAR, calls=500, warm=50)
_RESNET18 = FunctionOrder("resnet18", calls=20, warm=2)
_PIXELS = FunctionOrder(PIXELS, batch=32, calls=20, warm=2)


def calls(environment: Environment, rounds: Rounds) -> Iterator[ComparisonRow]:
    """All rows about warm calls, of one native function and two of ours."""
    with (
        worker_node(gpu_memory_bytes=4 * GIB) as found,
        function_process(environment) as native,
        function_process(found.environment(environment, "one", "wait"), shim=True) as ours,
    ):
        yield from _costs(native, ours, rounds)
        yield from _threads(native, ours, rounds)
        yield from _two_functions(found, ours, environment, rounds)


def _costs(
    native: FunctionProcess, ours: FunctionProcess, rounds: Rounds
) -> Iterator[ComparisonRow]:
    def row(name: str, order: FunctionOrder, *rest: object) -> ComparisonRow:
        pairs = alternate(native, ours, replace(order, most_s=rounds.most_s), rounds)
        return compared(name, pairs, *rest)  # type: ignore[arg-type] # as compared takes them

    yield row("a warm call of Linear(4, 4)", _LINEAR, extra, US, 250e-6, US)
    yield row(
        "the same, with gradients recorded", replace(_LINEAR, how="grad"), extra, US, None, US
    )
    yield row("resnet18, batch 1", _RESNET18, ratio, RATIO, 1.10)
    yield row("resnet18, batch 1, host to host", replace(_RESNET18, how="whole"), ratio, RATIO)
    yield row("19 MB just written, 128 KB out", replace(_PIXELS, how="fresh"), extra, MS, 3e-3)
    yield row("the same, host to host", replace(_PIXELS, how="whole"), extra, MS)
    yield row("the same 19 MB again", _PIXELS, extra, MS)


def _threads(
    native: FunctionProcess, ours: FunctionProcess, rounds: Rounds
) -> Iterator[ComparisonRow]:
    """Calls a second by threads of one function."""
    rounds = replace(rounds, count=max(1, rounds.count // 2))
    for model in (LINEAR, "resnet18"):
        for count in THREADS:
            order = FunctionOrder(model, warm=2, threads=count, most_s=rounds.most_s)
            pairs = alternate(native, ours, order, rounds)
            values = [(_rate(one), _rate(other)) for one, other in pairs]
            ratios = [other / one for one, other in values]
            native_rate, our_rate = (median(rates) for rates in zip(*values, strict=True))
            name = f"{model} by {count} thread{'s' * (count > 1)}"
            yield ComparisonRow(
                name, median(ratios), RATIO, None, native_rate, our_rate, RATE, rounds=ratios
            )


def _two_functions(
    found: WorkerNode, one: FunctionProcess, environment: Environment, rounds: Rounds
) -> Iterator[ComparisonRow]:
    """Two functions on one GPU beside one function alone; one at a time holds the GPU's lease."""
    order = FunctionOrder("resnet18", warm=2, threads=1, most_s=rounds.most_s)
    rounds = replace(rounds, count=max(1, rounds.count // 2))
    with function_process(found.environment(environment, "other", "wait"), shim=True) as other:
        for name, second in (
            ("two functions, the same model", order),
            ("two functions, a model each", replace(order, seed=1)),
        ):
            other.ask(second)
            values = []
            for _ in range(rounds.count):
                alone = _rate(one.ask(order))
                values.append(
                    (alone, sum(_rate(answer) for answer in _both(one, other, order, second)))
                )
            alones, boths = zip(*values, strict=True)
            ratios = [both / alone for alone, both in values]
            yield ComparisonRow(
                name, median(ratios), RATIO, None, median(alones), median(boths), RATE, ratios
            )


def _both(
    one: FunctionProcess, other: FunctionProcess, first: FunctionOrder, second: FunctionOrder
) -> Sequence[OrderResult]:
    one.send(first)
    other.send(second)
    return one.receive(), other.receive()


def _rate(answer: OrderResult) -> float:
    return answer.calls / answer.elapsed_s
