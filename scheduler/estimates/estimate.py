"""The one estimate of how long a request takes on a slot, beside its neighbours.

Every placement decision reads its seconds here: what a policy compares, what a lease is expected to
take, what a local queue adds up, and what an explanation shows. Interference between models that
share a GPU therefore belongs into `estimate` alone.
"""

from collections.abc import Sequence

from cache_manager.model.ids import ModelId, Tier
from scheduler.estimates.profiles import Profiles
from scheduler.model.values import Estimate


def estimate(
    profiles: Profiles,
    models: tuple[ModelId, ...],
    batch: int,
    gpu_type: str,
    missing: Sequence[tuple[ModelId, Tier]],
    neighbours: tuple[ModelId, ...],
) -> Estimate:
    """The expected seconds to load what is missing, and to run all models once, one by one.

    `missing` are the models that the slot lacks, each with the tier to load it from. `neighbours`
    are the models of the leases that would run beside this one on the same GPU. They change nothing
    yet: profiles are assumed to hold whatever else runs.
    """
    del neighbours  # until the interference study's model is used here
    load_s = 0.0
    for model, source in missing:
        load_s += profiles.load_s(model, source)
    if len(models) == 1:
        return Estimate(load_s, profiles.run_s(models[0], batch, gpu_type))
    return Estimate(load_s, sum(profiles.run_s(model, batch, gpu_type) for model in models))
