"""What one request used: the time of its leases, and its models' memory for so long."""

from collections.abc import Mapping
from dataclasses import dataclass

from cache_manager.model.ids import GpuId, ModelId
from scheduler.core.billing.charges import CHARGES, GPU_TIME, IN_USE
from scheduler.core.core import Core
from scheduler.estimates.profiles import Profile
from scheduler.model.actions import Dispatch
from scheduler.service.billing.prices import Billing
from scheduler.service.history.history import RequestRecord
from scheduler.service.views.cluster_report import of_lease


@dataclass(frozen=True, slots=True)
class UseShown:
    """A request's own part: of a lease that requests share, an equal one; idle time is not in it.

    `cost` is None without prices.
    """

    gpu_s: float
    gpu_byte_s: float
    cost: float | None


def used_by(record: RequestRecord, core: Core, billing: Billing, now_s: float) -> UseShown:
    """What a request has used so far, at the present sizes of its models."""
    gpu_us = byte_us = 0
    cost = 0.0
    known = core.cluster.profiles.known()
    for decided in record.decided:
        action = decided.action
        happened = of_lease(record, action.lease) if isinstance(action, Dispatch) else None
        if happened is None or not isinstance(action, Dispatch):
            continue
        used_s = happened.used_s(now_s, own=action.own) / max(1, len(action.requests))
        amounts = [0] * CHARGES
        used_us = int(used_s * 1e6)
        amounts[GPU_TIME] = used_us * (1 + len(action.more_slots))
        amounts[IN_USE] = used_us * _bytes(action.models, known)
        gpu_us += amounts[GPU_TIME]
        byte_us += amounts[IN_USE]
        cost += billing.cost(amounts, _gpu_type(core, action.gpu))
    return UseShown(gpu_us / 1e6, byte_us / 1e6, cost if billing.priced else None)


def _bytes(models: tuple[ModelId, ...], known: Mapping[ModelId, Profile]) -> int:
    return sum(known[model].memory_bytes for model in models if model in known)


def _gpu_type(core: Core, gpu: GpuId) -> str:
    found = core.cluster.gpus.get(gpu)
    return "" if found is None else found.spec.gpu_type
