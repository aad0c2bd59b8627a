"""What the scheduler keeps in the datastore: its keys, and their values as JSON (docs/etcd.md)."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from cache_manager.model.ids import GpuId, ModelId, Tier
from cache_manager.model.request_rates import IdleGaps
from scheduler.cluster.slots import Gpu, Slot
from scheduler.estimates.profiles import Profile
from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import OwnerTerms, check_terms
from scheduler.model.values import Configuration
from scheduler.wire.codec import Codec

MODELS, GPUS, LRU, FINISH = "models/", "gpus/", "lru/", "finish/"
OF_GPUS = (GPUS, LRU, FINISH)
POLICY = "policy"
# The time of a model's last use is kept to the hour, so that use alone is written once an hour.
HOUR_S = 3600

CONFIGURATION, ADMINISTRATOR = "configuration", "administrator"

# Residents of one GPU that are listed: the most recently used ones.
_MOST_LISTED = 2000
# Of how much a gap counts; smaller counts are as good as none.
_DECIMALS = 4

StoredRecord = Mapping[str, object]


# What reading JSON of any shape and size may raise; an OverflowError is a number without end.
UNREADABLE = ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError


class BadRecord(ValueError):
    """A value in the datastore that does not fit its key."""


class PolicyChoice(NamedTuple):
    """The policy in force, and who chose it: an administrator's choice outlives restarts."""

    name: str
    parameters: Mapping[str, float]
    chosen_by: str = CONFIGURATION


class GpuOrder(NamedTuple):
    """One GPU's residents from the least to the most recently used, and the pinned models.

    `older` residents were used before all of these and are not listed.
    """

    models: tuple[ModelId, ...]
    pinned: frozenset[ModelId]
    older: int = 0


def key(kind: str, name: str) -> str:
    """The key of one model or GPU; a name may contain anything."""
    return kind + quote(name, safe="@:+=,~")


def name(kind: str, of_key: str) -> str:
    return unquote(of_key.removeprefix(kind))


def encoded(record: StoredRecord) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


# -- GPUs ---------------------------------------------------------------------------------------


def gpu_records(gpu: Gpu, unix_offset_s: float) -> Iterator[tuple[str, StoredRecord]]:
    """Status, LRU list and finish times of one GPU; the offset converts the core's time to Unix."""
    gpu_id = gpu.spec.id
    yield key(GPUS, gpu_id), _status(gpu)
    older = max(0, len(gpu.cache.residents) - _MOST_LISTED)
    models = [
        {"model": resident.model, "memory_bytes": resident.bytes, "pinned": resident.pinned}
        for resident in islice(gpu.cache.residents.values(), older, None)
    ]
    yield key(LRU, gpu_id), {"models": models, "older": older} if older else {"models": models}
    yield key(FINISH, gpu_id), {"slots": [_finish(slot, unix_offset_s) for slot in gpu.slots]}


def _status(gpu: Gpu) -> StoredRecord:
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


def _finish(slot: Slot, unix_offset_s: float) -> StoredRecord:
    return {
        "slot": slot.id,
        "free_unix_s": round(slot.free_s + unix_offset_s, 3),
        "waiting_s": round(slot.local_s, 3),
    }


def gpu_order(value: bytes) -> GpuOrder:
    try:
        record = json.loads(value)
        models = record["models"]
        pinned = frozenset(ModelId(model["model"]) for model in models if model["pinned"])
        older = int(record.get("older", 0))
        return GpuOrder(tuple(ModelId(str(model["model"])) for model in models), pinned, older)
    except UNREADABLE as error:
        raise BadRecord(str(error)) from error


def gpu_of(lru_key: str) -> GpuId:
    return GpuId(name(LRU, lru_key))


# -- models -------------------------------------------------------------------------------------


def profile_record(profile: Profile, used_unix_s: int, gaps: IdleGaps) -> StoredRecord:
    """The profile of one model, the hour of its last use, and the gaps between its uses."""
    counts = [[place, round(count, _DECIMALS)] for place, count in gaps.counts]
    seen = [entry for entry in counts if entry[1]]
    return ({"gaps": seen} if seen else {}) | {
        "used_unix_s": used_unix_s,
        "memory_bytes": profile.memory_bytes,
        "measured_bytes": profile.measured_bytes,
        "load": [
            {"tier": tier.name, "load_s": load_s, "measured": tier in profile.measured_loads}
            for tier, load_s in sorted(profile.load_s.items())
        ],
        "run": [
            {
                "batch": batch,
                "gpu_type": gpu_type,
                "run_s": run_s,
                "measured": (batch, gpu_type) in profile.measured_runs,
            }
            for (batch, gpu_type), run_s in sorted(profile.run_s.items())
            if (batch, gpu_type) not in profile.stand_ins
        ],
        "configured": [
            {**configuration._asdict(), "gpu_type": gpu_type, "run_s": run_s}
            for (configuration, gpu_type), run_s in profile.configured_s.items()
        ],
        "usual_run_s": profile.usual_run_s,
        "features": profile.features,
    }


def profile(value: bytes) -> Profile:
    try:
        record = json.loads(value)
        made = Profile(_positive(record["memory_bytes"]))
        made.measured_bytes = int(record["measured_bytes"])
        for load in record["load"]:
            tier = Tier[load["tier"]]
            made.load_s[tier] = float(load["load_s"])
            if load["measured"]:
                made.measured_loads.add(tier)
        for run in record["run"]:
            batch = _positive(run["batch"]), str(run["gpu_type"])
            if run["measured"]:
                made.measured_runs.add(batch)
            made.keep_run(batch, float(run["run_s"]))
        for run in record["configured"]:
            sizes = (_positive(run[part]) for part in Configuration._fields)
            made.keep_configured((Configuration(*sizes), str(run["gpu_type"])), float(run["run_s"]))
        usual = record["usual_run_s"]
        made.usual_run_s = None if usual is None else float(usual)
        made.features = {str(name): float(value) for name, value in record["features"].items()}
    except UNREADABLE as error:
        raise BadRecord(str(error)) from error
    return made


def idle_gaps(value: bytes) -> IdleGaps:
    """The gaps between a model's uses as they were stored; none in a record without them."""
    try:
        return IdleGaps.of((int(place), float(n)) for place, n in json.loads(value).get("gaps", ()))
    except UNREADABLE as error:
        raise BadRecord(str(error)) from error


def last_used_unix_s(value: bytes) -> int:
    """The hour of a model's last use, by its record."""
    try:
        return int(json.loads(value)["used_unix_s"])
    except UNREADABLE as error:
        raise BadRecord(str(error)) from error


def is_unused(used_unix_s: int, since_unix_s: float) -> bool:
    """Whether a model was last used before then; its use counts as late as its hour allows."""
    return used_unix_s + HOUR_S <= since_unix_s


def _positive(value: Any) -> int:
    number = int(value)
    if number <= 0:
        raise BadRecord(f"{number} is not above zero")
    return number


# -- the policy ---------------------------------------------------------------------------------


def policy_record(choice: PolicyChoice) -> StoredRecord:
    return choice._asdict() | {"parameters": dict(choice.parameters)}


def policy_choice(value: bytes) -> PolicyChoice:
    """The policy in force as it was stored; the policy itself may not exist."""
    try:
        record = json.loads(value)
        parameters = {str(name): float(number) for name, number in record["parameters"].items()}
        return PolicyChoice(str(record["name"]), parameters, str(record["chosen_by"]))
    except UNREADABLE as error:
        raise BadRecord(str(error)) from error


TERMS = "terms/"
_TERMS: Codec[OwnerTerms] = Codec(OwnerTerms)


def terms_key(owner: str) -> str:
    return key(TERMS, owner)


def terms_record(terms: OwnerTerms) -> StoredRecord:
    """The terms, without those that are as usual."""
    record: StoredRecord = _TERMS.to_plain(terms)
    return record


def owner_terms(value: bytes) -> OwnerTerms:
    try:
        return check_terms(_TERMS.from_plain(json.loads(value)))
    except (*UNREADABLE, BadValue) as error:
        raise BadRecord(str(error)) from error
