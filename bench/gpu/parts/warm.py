"""Warm calls on a GPU beside native eager PyTorch and beside native CUDA graphs."""

from statistics import median

from bench.gpu.gpu_bench import GpuBench, PartOptions, Say, check_native, gpu_bench
from bench.gpu.results_file import Row
from bench.measure.comparisons import Rounds, alternate
from bench.measure.function_orders import LINEAR, FunctionOrder
from bench.measure.report import MeasurementFailed

MODELS = ("resnet50", "vgg19", "densenet161", "squeezenet1_1", "vit_b_16")
BATCHES = (1, 32)
# What a call may take of a native eager one, and of a native replay of a CUDA graph.
OF_EAGER, OF_GRAPHS = 0.8, 1.03
_CALLS = {1: 50, 32: 20}
_ROUND_S, _ROUNDS = 1.0, 3
_MODEL_S = 25.0  # tracing, and the rounds of one batch


def measure(asked: PartOptions, say: Say) -> None:
    """Each model at each batch: input and output on the GPU, then both on the host."""
    models = (LINEAR,) if asked.emulated else MODELS
    missed = []
    with gpu_bench(asked) as found:
        check_native(asked, found.native.ask(FunctionOrder(LINEAR)).device)
        for name in models:
            for batch in BATCHES:
                if asked.left_s() < _MODEL_S:
                    missed.append(f"{name} at {batch}")
                    continue
                for how in ("call", "whole"):
                    say(_row(found, name, batch, how))
    if missed:
        raise MeasurementFailed(f"no time was left for {', '.join(missed)}")


def _row(found: GpuBench, name: str, batch: int, how: str) -> Row:
    rounds = Rounds(_ROUNDS, _ROUND_S)
    order = FunctionOrder(
        name, batch=batch, how=how, calls=_CALLS[batch], warm=5, most_s=rounds.most_s
    )
    pairs = alternate(found.native, found.ours, order, rounds)
    native_s = median(median(one.seconds) for one, _ in pairs)
    ours_s = median(median(other.seconds) for _, other in pairs)
    row: Row = {
        "model": name,
        "batch": batch,
        "how": how,
        "eager_ms": native_s * 1e3,
        "ours_ms": ours_s * 1e3,
        "of_eager": ours_s / native_s,
        "graphs_ms": None,
        "of_graphs": None,
        "worker_compute_ms": _each_ms([other.compute_s / other.calls for _, other in pairs]),
        "worker_transfer_ms": _each_ms([other.transfer_s / other.calls for _, other in pairs]),
    }
    if how == "call":  # a replay reads and writes memory on the GPU
        graph = FunctionOrder(name, batch=batch, how="graph", calls=order.calls, warm=5)
        graphs_s = median(found.native.ask(graph).seconds)
        row |= {"graphs_ms": graphs_s * 1e3, "of_graphs": ours_s / graphs_s}
        row["met"] = row["of_eager"] <= OF_EAGER and row["of_graphs"] <= OF_GRAPHS
    else:
        row["met"] = row["of_eager"] <= OF_EAGER
    return row


def _each_ms(seconds: list[float]) -> float:
    return median(seconds) * 1e3
