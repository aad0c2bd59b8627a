"""First answers by stage: a model new to the node, and one that has left the GPU."""

from statistics import median

from bench.gpu.gpu_bench import GpuBench, PartOptions, Say, gpu_bench, while_time_is_left
from bench.gpu.results_file import Row
from bench.measure.function_orders import LAYERS, FunctionOrder

# A stack of layers with the parameters of a model of 7 B, in half precision: 13 GB.
SEVEN_B = f"{LAYERS}32x4096"
MODELS = ("resnet50", "vgg19", SEVEN_B)
FIRST_S = {"resnet50": 0.060, "vgg19": 0.150}  # aimed at, for a model that the node has
_EMULATED = ("linear", f"{LAYERS}2x64")
_ROUNDS, _MODEL_S = 5, 45.0


def measure(asked: PartOptions, say: Say) -> None:
    """Each model's first answer of all, then first answers after it has left the GPU."""
    models = _EMULATED if asked.emulated else MODELS
    with gpu_bench(asked, native=False) as found:
        for name in while_time_is_left(asked, models, _MODEL_S):
            say(_new(found, name))
            say(_evicted(found, name, 2 if asked.emulated else _ROUNDS))


def _new(found: GpuBench, name: str) -> Row:
    """The graph is traced, the weights are sent, a worker takes them."""
    before = found.node.load_phases_s()
    answer = found.ours.ask(FunctionOrder(name, how="whole", most_s=0.0))
    stages = {
        "trace": answer.trace_s,
        "acquire": answer.queue_s,
        **_since(before, found.node.load_phases_s()),
        "inputs and results": answer.transfer_s,
        "compute": answer.compute_s,
    }
    return _row("new to the node", name, answer.weights_bytes, answer.seconds[0], stages)


def _evicted(found: GpuBench, name: str, rounds: int) -> Row:
    """The weights are in host memory, a worker waits, and the function has its graph."""
    totals, all_stages, weights_bytes = [], [], 0
    for _ in range(rounds):
        found.node.evict_all()
        before = found.node.load_phases_s()
        answer = found.ours.ask(FunctionOrder(name, how="whole", most_s=0.0))
        weights_bytes = answer.weights_bytes
        totals.append(answer.seconds[0])
        all_stages.append(
            {
                **_since(before, found.node.load_phases_s()),
                "inputs and results": answer.transfer_s,
                "compute": answer.compute_s,
            }
        )
    stages = {stage: median(each[stage] for each in all_stages) for stage in all_stages[0]}
    row = _row("evicted before", name, weights_bytes, median(totals), stages)
    target_s = FIRST_S.get(name)
    copy_s = stages.get("transfer", 0.0)
    return row | {
        "gb_a_second": weights_bytes / copy_s / 1e9 if copy_s else None,
        "target_s": target_s,
        "met": None if target_s is None else row["first_s"] <= target_s,
    }


def _row(what: str, name: str, weights_bytes: int, first_s: float, stages: dict[str, float]) -> Row:
    rest_s = first_s - sum(stages.values())
    shown = {stage: round(spent_s, 5) for stage, spent_s in stages.items()}
    return {
        "first answer": what,
        "model": name,
        "weights_bytes": weights_bytes,
        "first_s": first_s,
        "stages_s": {**shown, "the rest": round(rest_s, 5)},
    }


def _since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {stage: total_s - before.get(stage, 0.0) for stage, total_s in after.items()}
