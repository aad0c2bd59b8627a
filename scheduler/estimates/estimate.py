"""The one estimate of how long a request takes on a slot, beside its neighbours.

Every placement decision reads its seconds here: what a policy compares, what a lease is expected to
take, what a local queue adds up, and what an explanation shows. Interference between models that
share a GPU therefore belongs into `run_s` alone.
"""

from collections.abc import Sequence

from cache_manager.model.ids import ModelId, Tier
from scheduler.estimates.profiles import Profiles
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
    neighbours: tuple[ModelId, ...],
) -> float:
    """The expected seconds to run all models once, one by one, on a GPU of this type.

    `neighbours` are the models of the leases that would run beside this one on the same GPU. They
    change nothing yet: profiles are assumed to hold whatever else runs.
    """
    del neighbours  # until the interference study's model is used here
    total_s = 0.0
    for model in models:
        total_s += profiles.run_s(model, batch, gpu_type)
    return total_s


def configured_s(
    profiles: Profiles, models: tuple[ModelId, ...], configuration: Configuration, gpu_type: str
) -> float:
    """The expected seconds to run all models once, one by one, in this configuration."""
    total_s = 0.0
    for model in models:
        total_s += profiles.configured_s(model, configuration, gpu_type)
    return total_s
