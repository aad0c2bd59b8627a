"""What the scheduler keeps in the datastore: its keys, and their values as JSON (docs/etcd.md).

What is read is exactly of the types below; fields that only others know are passed over.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple
from urllib.parse import quote, unquote

from msgspec import Struct, json

from cache_manager.model.ids import ModelId
from scheduler.cluster.slots import Gpu, Slot
from scheduler.model.profiles import Profile
from scheduler.model.values import Number
from scheduler.wire.codec import read
from scheduler.wire.model_records import ModelRecord, profile_of

MODELS, GPUS, LRU, FINISH = "models/", "gpus/", "lru/", "finish/"
OF_GPUS = (GPUS, LRU, FINISH)
POLICY = "policy"
# The time of a model's last use is kept to the hour, so that use alone is written once an hour.
HOUR_S = 3600

CONFIGURATION, ADMINISTRATOR = "configuration", "administrator"

# Residents of one GPU that are listed: the most recently used ones.
_MOST_LISTED = 2000


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


class StoredModel(NamedTuple):
    """What a record says."""

    profile: Profile
    used_unix_s: int


_MODELS = json.Decoder(ModelRecord)


def stored_model(value: bytes) -> StoredModel:
    record = read(_MODELS, value)
    return StoredModel(profile_of(record), record.used_unix_s)


def is_unused(used_unix_s: int, since_unix_s: float) -> bool:
    """Whether a model was last used before then; its use counts as late as its hour allows."""
    return used_unix_s + HOUR_S <= since_unix_s


# -- the policy -------------------------------------------------------------------------------


class PolicyChoice(Struct, frozen=True):
    """The policy in force, and who chose it: an administrator's choice outlives restarts."""

    name: str
    parameters: Mapping[str, Number]
    chosen_by: str


_CHOICES = json.Decoder(PolicyChoice)


def policy_choice(value: bytes) -> PolicyChoice:
    """The policy in force as it was stored; the policy itself may not exist."""
    return read(_CHOICES, value)
