"""A model's profile, as it is stored and recorded."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from cache_manager.model.ids import Tier
from cache_manager.model.request_rates import IdleGaps
from scheduler.model.errors import BadValue
from scheduler.model.profiles import Profile
from scheduler.model.values import Configuration, Number

# Of how much a gap counts; smaller counts are as good as none.
_DECIMALS = 4

Positive = Annotated[int, Meta(gt=0)]


class LoadTime(Struct, frozen=True):
    """The seconds of a load from one tier, by its name."""

    tier: str
    load_s: Number
    measured: bool


class RunTime(Struct, frozen=True):
    """The seconds of one run of a batch on one type of GPU."""

    batch: Positive
    gpu_type: str
    run_s: Number
    measured: bool


class ConfiguredTime(Struct, frozen=True):
    """The seconds of one run in a configuration."""

    batch: Positive
    vcpus: Positive
    vgpus: Positive
    gpu_type: str
    run_s: Number


class ModelRecord(Struct, frozen=True, omit_defaults=True):
    """The profile of one model, the hour of its last use, and the gaps between its uses."""

    used_unix_s: int
    memory_bytes: Positive
    measured_bytes: int
    load: tuple[LoadTime, ...]
    run: tuple[RunTime, ...]
    configured: tuple[ConfiguredTime, ...]
    usual_run_s: Number | None
    features: Mapping[str, Number]
    gaps: tuple[tuple[int, Number], ...] = ()


def model_record(profile: Profile, used_unix_s: int) -> ModelRecord:
    counts = ((place, round(count, _DECIMALS)) for place, count in profile.gaps.counts)
    return ModelRecord(
        used_unix_s,
        profile.memory_bytes,
        profile.measured_bytes,
        tuple(
            LoadTime(tier.name, load_s, tier in profile.measured_loads)
            for tier, load_s in sorted(profile.load_s.items())
        ),
        tuple(
            RunTime(batch, gpu_type, run_s, (batch, gpu_type) in profile.measured_runs)
            for (batch, gpu_type), run_s in sorted(profile.run_s.items())
            if (batch, gpu_type) not in profile.stand_ins
        ),
        tuple(
            ConfiguredTime(*configuration, gpu_type, run_s)
            for (configuration, gpu_type), run_s in profile.configured_s.items()
        ),
        profile.usual_run_s,
        dict(profile.features),
        tuple(entry for entry in counts if entry[1]),
    )


def profile_of(record: ModelRecord) -> Profile:
    """What a record says; BadValue if no model can have it."""
    try:
        return _profile(record)
    except (KeyError, ValueError) as error:  # no such tier, or gaps that nobody can have seen
        raise BadValue(str(error)) from error


def _profile(record: ModelRecord) -> Profile:
    profile = Profile(record.memory_bytes)
    profile.measured_bytes = record.measured_bytes
    for load in record.load:
        tier = Tier[load.tier]
        profile.load_s[tier] = load.load_s
        if load.measured:
            profile.measured_loads.add(tier)
    for run in record.run:
        batch = run.batch, run.gpu_type
        if run.measured:
            profile.measured_runs.add(batch)
        profile.keep_run(batch, run.run_s)
    for times in record.configured:
        configuration = Configuration(times.batch, times.vcpus, times.vgpus)
        profile.keep_configured((configuration, times.gpu_type), times.run_s)
    profile.usual_run_s = record.usual_run_s
    profile.features = dict(record.features)
    profile.gaps = IdleGaps.of(record.gaps)
    return profile
