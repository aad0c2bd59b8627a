"""`python -m bench.gpu.latency`: calls on a GPU against native eager PyTorch, and first answers."""

import sys
from statistics import median
from typing import Any

from bench.gpu.gpu_bench import GpuBench, GpuBenchOptions, check_native, gpu_bench, main
from bench.measure.comparisons import Rounds, alternate
from bench.measure.function_orders import COPY, FunctionOrder

MODELS = ("resnet50", "vgg19", "densenet161", "squeezenet1_1", "vit_b_16")
# Batch sizes, with the ratio to native that is aimed at; seconds of a first answer, likewise.
RATIOS = {1: 1.0, 32: 1.05}
FIRST_S = {"resnet50": 0.060, "vgg19": 0.150}
_CALLS = {1: 50, 32: 20}
_LINGER_S = 0.05


def measure(asked: GpuBenchOptions) -> dict[str, Any]:
    """Warm calls of each model at both batches, then loads of each from the host's memory."""
    warm: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = []
    with gpu_bench(asked, linger_s=_LINGER_S) as found:
        link = found.native.ask(FunctionOrder(COPY, calls=10, warm=2))
        check_native(asked, link.device)
        link_bytes_s = link.weights_bytes / min(link.seconds)
        for name in asked.models:
            for batch in RATIOS:
                warm += [_warm(found, asked, name, batch, how) for how in ("call", "whole")]
            first.append(_first(found, asked, name, link_bytes_s))
    return {"host_to_device_bytes_s": link_bytes_s, "warm": warm, "first_answers": first}


def _warm(
    found: GpuBench, asked: GpuBenchOptions, name: str, batch: int, how: str
) -> dict[str, Any]:
    order = FunctionOrder(name, batch=batch, how=how, calls=_CALLS[batch], warm=5, most_s=3.0)
    pairs = alternate(found.native, found.ours, order, Rounds(asked.rounds, order.most_s))
    values = [(median(one.seconds), median(other.seconds)) for one, other in pairs]
    natives, ours = zip(*values, strict=True)
    ratio = median(other / one for one, other in values)
    print(f"{name}, batch {batch}, {how}: {median(ours) * 1e3:.2f} ms, {ratio:.2f} x native")
    return {
        "model": name,
        "batch": batch,
        "how": how,
        "native_s": median(natives),
        "ours_s": median(ours),
        "ratio": ratio,
        "target": RATIOS[batch],
        "met": ratio <= RATIOS[batch],
    }


def _first(
    found: GpuBench, asked: GpuBenchOptions, name: str, link_bytes_s: float
) -> dict[str, Any]:
    """The first answer after the model left the GPU: its weights are on the host, a worker waits,
    and the function has its graph."""
    seconds, loads, weights_bytes = [], [], 0
    for _ in range(asked.rounds):
        found.node.evict_all()
        answer = found.ours.ask(FunctionOrder(name, how="whole"))
        (resident,) = found.node.on_gpus()
        weights_bytes = answer.weights_bytes
        seconds.append(answer.seconds[0])
        loads.append(resident.load_s)
    first_s, load_s = median(seconds), median(loads)
    share = weights_bytes / load_s / link_bytes_s
    print(f"{name}, first answer: {first_s * 1e3:.1f} ms, {share:.0%} of the link while loading")
    target_s = FIRST_S.get(name)
    return {
        "model": name,
        "weights_bytes": weights_bytes,
        "first_s": first_s,
        "load_s": load_s,
        "share_of_link": share,
        "target_s": target_s,
        "met": None if target_s is None else first_s <= target_s,
        "rounds_s": seconds,
    }


if __name__ == "__main__":
    sys.exit(main("gpu.latency", __doc__ or "", MODELS, measure))
