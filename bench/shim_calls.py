"""Warm calls, native against ours: their cost, large inputs, and how many a second."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from bench.shim_node import Child, Environment, Node, child, node
from bench.shim_orders import LINEAR, PIXELS, Answer, Order
from bench.shim_rows import MS, RATE, RATIO, US, Rounds, Row, alternate, compared, extra, ratio

GIB = 1 << 30
THREADS = (1, 4, 16)

_LINEAR = Order(LINEAR, calls=500, warm=50)
_RESNET18 = Order("resnet18", calls=20, warm=2)
_PIXELS = Order(PIXELS, batch=32, calls=20, warm=2)


def calls(environment: Environment, rounds: Rounds) -> Iterator[Row]:
    """Everything about warm calls; one native function and two of ours."""
    with (
        node(gpu_memory_bytes=4 * GIB) as found,
        child(environment) as native,
        child(found.environment(environment, "one", "wait"), shim=True) as ours,
    ):
        yield from _costs(native, ours, rounds)
        yield from _threads(native, ours, rounds)
        yield from _two_functions(found, ours, environment, rounds)


def _costs(native: Child, ours: Child, rounds: Rounds) -> Iterator[Row]:
    def row(name: str, order: Order, *rest: object) -> Row:
        pairs = alternate(native, ours, replace(order, most_s=rounds.most_s), rounds)
        return compared(name, pairs, *rest)  # type: ignore[arg-type] # as compared says

    yield row("a warm call of Linear(4, 4)", _LINEAR, extra, US, 250e-6, US)
    yield row(
        "the same, with gradients recorded", replace(_LINEAR, how="grad"), extra, US, None, US
    )
    yield row("resnet18, batch 1", _RESNET18, ratio, RATIO, 1.10)
    yield row("resnet18, batch 1, host to host", replace(_RESNET18, how="whole"), ratio, RATIO)
    yield row("19 MB just written, 128 KB out", replace(_PIXELS, how="fresh"), extra, MS, 3e-3)
    yield row("the same, host to host", replace(_PIXELS, how="whole"), extra, MS)
    yield row("the same 19 MB again", _PIXELS, extra, MS)


def _threads(native: Child, ours: Child, rounds: Rounds) -> Iterator[Row]:
    """Calls a second by threads of one function."""
    rounds = replace(rounds, count=max(1, rounds.count // 2))
    for model in (LINEAR, "resnet18"):
        for count in THREADS:
            order = Order(model, warm=2, threads=count, most_s=rounds.most_s)
            pairs = alternate(native, ours, order, rounds)
            values = [(_rate(one), _rate(other)) for one, other in pairs]
            ratios = [other / one for one, other in values]
            native_rate, our_rate = (median(rates) for rates in zip(*values, strict=True))
            name = f"{model} by {count} thread{'s' * (count > 1)}"
            yield Row(name, median(ratios), RATIO, None, native_rate, our_rate, RATE, rounds=ratios)


def _two_functions(
    found: Node, one: Child, environment: Environment, rounds: Rounds
) -> Iterator[Row]:
    """Two functions on one GPU, against one of them alone; the GPU is lent to one at a time."""
    order = Order("resnet18", warm=2, threads=1, most_s=rounds.most_s)
    rounds = replace(rounds, count=max(1, rounds.count // 2))
    with child(found.environment(environment, "other", "wait"), shim=True) as other:
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
            yield Row(
                name, median(ratios), RATIO, None, median(alones), median(boths), RATE, ratios
            )


def _both(one: Child, other: Child, first: Order, second: Order) -> Sequence[Answer]:
    one.tell(first)
    other.tell(second)
    return one.hear(), other.hear()


def _rate(answer: Answer) -> float:
    return answer.calls / answer.elapsed_s
