"""What the scheduler keeps in the datastore: its keys, and their values as JSON (docs/etcd.md).

What is read is exactly of the types below; fields that only others know are passed over.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, NamedTuple
from urllib.parse import quote, unquote

from msgspec import Meta, Struct, json

from cache_manager.model.ids import ModelId, Tier
from cache_manager.model.request_rates import IdleGaps
from scheduler.core.slots import Gpu, Slot
from scheduler.estimates.profiles import Profile
from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import OwnerTerms, check_terms
from scheduler.model.values import Configuration, Number
from scheduler.wire.codec import read

MODELS, GPUS, LRU, FINISH = "models/", "gpus/", "lru/", "finish/"
OF_GPUS = (GPUS, LRU, FINISH)
POLICY, TERMS = "policy", "terms/"
# The time of a model's last use is kept to the hour, so that use alone is written once an hour.
HOUR_S = 3600

CONFIGURATION, ADMINISTRATOR = "configuration", "administrator"

# Residents of one GPU that are listed: the most recently used ones.
_MOST_LISTED = 2000
# Of how much a gap counts; smaller counts are as good as none.
_DECIMALS = 4

Positive = Annotated[int, Meta(gt=0)]


def key(kind: str, name: str) -> str:
    """The key of one model or GPU; a name may contain anything."""
    return kind + quote(name, safe="@:+=,~")


def name(kind: str, of_key: str) -> str:
    return unquote(of_key.removeprefix(kind))


# -- GPUs ---------------------------------------------------------------------------------------


class ListedModel(Struct, frozen=True):
    """A resident of a GPU."""

    model: ModelId
    memory_bytes: int
    pinned: bool


class GpuOrder(Struct, frozen=True, omit_defaults=True):
    """One GPU's residents from the least to the most recently used.

    `older` residents were used before all of these and are not listed.
    """

    models: tuple[ListedModel, ...]
    older: int = 0


def gpu_records(gpu: Gpu, unix_offset_s: float) -> Iterator[tuple[str, object]]:
    """Status, LRU list and finish times of one GPU; the offset converts the core's time to Unix."""
    gpu_id = gpu.spec.id
    yield key(GPUS, gpu_id), _status(gpu)
    older = max(0, len(gpu.cache.residents) - _MOST_LISTED)
    models = [
        ListedModel(resident.model, resident.bytes, resident.pinned)
        for resident in islice(gpu.cache.residents.values(), older, None)
    ]
    yield key(LRU, gpu_id), GpuOrder(tuple(models), older)
    yield key(FINISH, gpu_id), {"slots": [_finish(slot, unix_offset_s) for slot in gpu.slots]}


def _status(gpu: Gpu) -> Mapping[str, object]:
    return {
        "node": gpu.spec.node,
        "gpu_type": gpu.spec.gpu_type,
        "status": _state(gpu),
        "memory_bytes": gpu.cache.memory_bytes,
        "used_bytes": gpu.cache.used_bytes,
        "withheld_bytes": gpu.cache.withheld_bytes,
        "slots": [
            {
                "slot": slot.id,
                "capacity": slot.capacity,
                "leases": list(slot.leases),
                "waiting": slot.local.count,
            }
            for slot in gpu.slots
        ],
    }


def _state(gpu: Gpu) -> str:
    if gpu.draining:
        return "draining"
    if gpu.silent:
        return "silent"
    return "idle" if any(slot.idle for slot in gpu.slots) else "busy"


def _finish(slot: Slot, unix_offset_s: float) -> Mapping[str, object]:
    return {
        "slot": slot.id,
        "free_unix_s": round(slot.free_s + unix_offset_s, 3),
        "waiting_s": round(slot.local_s, 3),
    }


_ORDERS = json.Decoder(GpuOrder)


def gpu_order(value: bytes) -> GpuOrder:
    return read(_ORDERS, value)


# -- models -------------------------------------------------------------------------------------


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


class StoredModel(NamedTuple):
    """What a record says."""

    profile: Profile
    gaps: IdleGaps
    used_unix_s: int


def model_record(profile: Profile, used_unix_s: int, gaps: IdleGaps) -> ModelRecord:
    counts = ((place, round(count, _DECIMALS)) for place, count in gaps.counts)
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


_MODELS = json.Decoder(ModelRecord)


def stored_model(value: bytes) -> StoredModel:
    record = read(_MODELS, value)
    try:
        return StoredModel(_profile(record), IdleGaps.of(record.gaps), record.used_unix_s)
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
    return profile


def is_unused(used_unix_s: int, since_unix_s: float) -> bool:
    """Whether a model was last used before then; its use counts as late as its hour allows."""
    return used_unix_s + HOUR_S <= since_unix_s


# -- the policy, and terms of owners ------------------------------------------------------------


class PolicyChoice(Struct, frozen=True):
    """The policy in force, and who chose it: an administrator's choice outlives restarts."""

    name: str
    parameters: Mapping[str, Number]
    chosen_by: str


_CHOICES = json.Decoder(PolicyChoice)
_TERMS = json.Decoder(OwnerTerms)


def policy_choice(value: bytes) -> PolicyChoice:
    """The policy in force as it was stored; the policy itself may not exist."""
    return read(_CHOICES, value)


def terms_key(owner: str) -> str:
    return key(TERMS, owner)


def owner_terms(value: bytes) -> OwnerTerms:
    return check_terms(read(_TERMS, value))
