"""The one estimate of how long a request takes on a slot, beside its neighbours.

Every placement decision reads its seconds here: what a policy compares, what a lease is expected to
take, what a local queue adds up, and what an explanation shows. Interference between models that
share a GPU therefore belongs into `run_s` alone.
"""

from collections.abc import Sequence

from cache_manager.model.ids import ModelId, Tier
from scheduler.estimates.profiles import Profiles
from scheduler.estimates.resource_metrics import Metrics
from scheduler.model.values import Configuration


def load_s(profiles: Profiles, missing: Sequence[tuple[ModelId, Tier]]) -> float:
    """The expected seconds to load the models that a slot lacks, each from this tier."""
    total_s = 0.0
    for model, source in missing:
        total_s += profiles.load_s(model, source)
    return total_s


def run_s(
    profiles: Profiles,
    models: tuple[ModelId, ...],
    batch: int,
    gpu_type: str,
    neighbours: tuple[tuple[ModelId, ...], ...],
) -> float:
    """The expected seconds to run all models once, one by one, on a GPU of this type.

    `neighbours` are the models of each lease that would run beside this one on the same GPU.
    """
    total_s = 0.0
    for model in models:
        alone_s = profiles.run_s(model, batch, gpu_type)
        total_s += (
            alone_s * _slowdown(profiles, model, gpu_type, neighbours) if neighbours else alone_s
        )
    return total_s


def slowdown(
    profiles: Profiles,
    models: tuple[ModelId, ...],
    gpu_type: str,
    neighbours: tuple[tuple[ModelId, ...], ...],
) -> float:
    """How many times as long the models run beside these leases; 1 alone, and if it is unknown."""
    if not neighbours:
        return 1.0
    alone_s = run_s(profiles, models, 1, gpu_type, ())
    return run_s(profiles, models, 1, gpu_type, neighbours) / alone_s if alone_s else 1.0


def _slowdown(
    profiles: Profiles,
    model: ModelId,
    gpu_type: str,
    neighbours: tuple[tuple[ModelId, ...], ...],
) -> float:
    """Of one model: it takes turns with itself, and the rest is as it was learned."""
    turns = 0.0
    others: list[Metrics] = []
    own = profiles.metrics(model)
    for lease in neighbours:
        if model in lease:
            turns += 1.0 / len(lease)
            continue
        metrics = profiles.mean_metrics(lease)
        if metrics is None:
            own = None
        else:
            others.append(metrics)
    if own is None or not others:
        return 1.0 + turns
    return profiles.interference.slowdown(gpu_type, own, others) + turns


def configured_s(
    profiles: Profiles, models: tuple[ModelId, ...], configuration: Configuration, gpu_type: str
) -> float:
    """The expected seconds to run all models once, one by one, in this configuration."""
    total_s = 0.0
    for model in models:
        total_s += profiles.configured_s(model, configuration, gpu_type)
    return total_s
