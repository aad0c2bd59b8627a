"""What the scheduler learns from: every model alone, and some pairs of models at once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

from bench.measure.report import MeasurementFailed
from bench.neighbours.job_node import CallsJob, JobNode

# Calls after which a worker has reported what its model uses: gpu_manager/worker/program/usage.py.
_CALLS_TO_METRICS = 8
_MOST_ROUNDS = 20


class PairSeen(NamedTuple):
    """Two models at once: how many times as long the jobs of each took, and what was expected."""

    models: tuple[str, str]
    trained: bool
    seen: tuple[float, float]
    expected: tuple[float, float]


def alone(node: JobNode, models: Sequence[str], seconds: float) -> dict[str, float]:
    """The seconds of one call of each model, that has the GPU to itself for so long."""
    found = {}
    for model in models:
        node.meet(model)
        (first,) = node.run(CallsJob(f"warm-{model}", model, _CALLS_TO_METRICS, 0.0))
        calls = max(_CALLS_TO_METRICS, round(seconds * _CALLS_TO_METRICS / first.seconds))
        for number in range(_MOST_ROUNDS):
            (done,) = node.run(CallsJob(f"alone-{model}-{number}", model, calls, 0.0))
            if node.has_metrics(model):
                break
        else:
            raise MeasurementFailed(f"nothing was counted of {model}")
        found[model] = done.seconds / calls
    return found


def split_pairs(
    models: Sequence[str], held_out: float, seed: int
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The pairs to train on, and this share of all pairs, which training does not see."""
    pairs = list(combinations(models, 2))
    Random(seed).shuffle(pairs)
    kept_back = round(held_out * len(pairs))
    return pairs[kept_back:], pairs[:kept_back]


def at_once(
    node: JobNode, pair: tuple[str, str], alone_s: Mapping[str, float], seconds: float
) -> tuple[float, float]:
    """How many times as long each took while both called, for about so long."""
    calls = [max(2, round(seconds / alone_s[model])) for model in pair]
    jobs = [
        CallsJob(f"pair-{model}", model, number, number * alone_s[model])
        for model, number in zip(pair, calls, strict=True)
    ]
    done = {found.name: found.seconds for found in node.run(*jobs)}
    one, other = (done[job.name] / job.alone_s for job in jobs)
    return one, other


def train(
    node: JobNode,
    pairs: Sequence[tuple[str, str]],
    alone_s: Mapping[str, float],
    seconds: float,
    announce: Callable[[str], None],
) -> None:
    """Run each pair at once, so that the scheduler learns from it."""
    for pair in pairs:
        one, other = at_once(node, pair, alone_s, seconds)
        announce(f"{pair[0]} {one:.2f}, {pair[1]} {other:.2f}")


def compare(
    node: JobNode,
    trained: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    alone_s: Mapping[str, float],
    seconds: float,
) -> list[PairSeen]:
    """Expected and seen slowdowns; what is expected is asked before a pair runs."""
    found = []
    for pairs, was_trained in ((trained, True), (held_out, False)):
        for one, other in pairs:
            expected = node.slowdown(one, other), node.slowdown(other, one)
            seen = at_once(node, (one, other), alone_s, seconds)
            found.append(PairSeen((one, other), was_trained, seen, expected))
    return found
