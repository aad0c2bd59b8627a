"""Handles an administrator's requests to a node: list models, status, evict, pin and unpin."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cache_manager.model.ids import GpuId, ModelId, Tier
from cache_manager.tier_index import Demotion
from gpu_manager.attachment.scheduling import Scheduling
from gpu_manager.errors import ClientNotAllowed, UnknownImage
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu, ModelOnGpu
from torch_shim.errors import BadFrame
from torch_shim.wire.messages import Admin

Row = dict[str, Any]

# What is said of a model that is on no GPU.
_ON_NO_GPU: Row = {
    **dict.fromkeys(("gpu", "runtime", "gpu_share", "merged", "since", "used")),
    **dict.fromkeys(("process_models", "bytes", "uses"), 0),
    "state": "stored",
    "pinned": False,
}


@dataclass(eq=False)
class NodeAdministration:
    """Answers ADMIN requests of clients that were authorised at HELLO."""

    node: GpuNode
    scheduling: Scheduling

    async def answer(self, asked: Admin) -> Row:
        do = asked.do
        if do == "models":
            return {"models": [*await self._resident(), *self._stored()]}
        if do == "status":
            return await self._status()
        orders = {
            "evict": self.scheduling.evict,
            "pin": self.scheduling.pin,
            "unpin": self.scheduling.unpin,
        }
        if do not in orders:
            raise ClientNotAllowed(f"unknown action {do!r}")
        if asked.model is None:
            raise BadFrame(f"{do} names no model")
        model = self._named(asked.model)
        await orders[do](model, None if asked.gpu is None else GpuId(asked.gpu))
        return {"model": model}

    def _named(self, text: str) -> ModelId:
        models = self.node.weights.catalogue.named(text)
        if not models:
            raise UnknownImage(text)
        if len(models) > 1:
            raise ClientNotAllowed(f"{text!r} is ambiguous: {', '.join(sorted(models))}")
        return models[0]

    async def _resident(self) -> list[Row]:
        status = await self.scheduling.survey()
        pinned = {
            (gpu.id, resident.model)
            for gpu in status.gpus
            for resident in gpu.residents
            if resident.pinned
        }
        return [
            self._row(gpu, resident) | {"pinned": (gpu.id, resident.model) in pinned}
            for gpu in self.node.gpus.values()
            for resident in gpu.by_use()
        ]

    def _row(self, gpu: HostGpu, resident: ModelOnGpu) -> Row:
        model = self.node.weights.catalogue.get(resident.model)
        there = resident.hosted is not None or resident.shares is not None  # its runtime is chosen
        return {
            "model": model.id,
            "label": model.label,
            "gpu": gpu.id,
            "tier": _tier_name(Tier.GPU),
            "state": "loading" if resident.hosted is None else "loaded",
            "runtime": resident.runtime if there else None,
            "process_models": gpu.process_models(resident) if there else 0,
            "gpu_share": resident.gpu_share,
            "merged": {
                name: dict(value) if isinstance(value, Mapping) else value
                for name, value in resident.merges._asdict().items()
            },
            "bytes": gpu.size_bytes(resident),
            "weights_bytes": model.table.total_bytes,
            "since": _clock(resident.since_s),
            "uses": resident.uses,
            "used": _clock(resident.used_s),
        }

    def _stored(self) -> Iterator[Row]:
        on_gpus = {model for gpu in self.node.gpus.values() for model in gpu.residents}
        for model in self.node.weights.catalogue:
            tier = self.node.weights.store.tier(model.digest)
            if model.id not in on_gpus and tier is not Tier.ABSENT:
                yield _ON_NO_GPU | {
                    "model": model.id,
                    "label": model.label,
                    "tier": _tier_name(tier),
                    "weights_bytes": model.table.total_bytes,
                }

    async def _status(self) -> Row:
        status, store = await self.scheduling.survey(), self.node.weights.store.status()
        counts = status.counts
        return {
            "node": self.node.name,
            "policy": status.policy,
            "waiting": status.waiting + status.waiting_locally,
            "leases": len(self.node.leases),
            "hits": counts.hits,
            "misses": counts.misses,
            "evictions": counts.evictions,
            "store": {
                "images": store.images,
                "bytes": store.kept_bytes,
                "budget_bytes": store.budget_bytes,
                "disk_images": store.disk_images,
                "disk_bytes": store.disk_bytes,
                "eviction": store.rule,
                "demotions": [_demotion(demotion) for demotion in store.demotions],
            },
            "gpus": [self._gpu(gpu) for gpu in self.node.gpus.values()],
        }

    def _gpu(self, gpu: HostGpu) -> Row:
        return {
            "id": gpu.id,
            "name": gpu.device.name,
            "memory_bytes": gpu.device.memory_bytes,
            "granted_bytes": gpu.ledger.granted_bytes,
            "shared_bytes": gpu.shared_bytes,
            "used_bytes": gpu.device.used_bytes(),
            "utilisation": gpu.device.utilisation(),
            "models": len(gpu.residents),
            "transfers": [
                {
                    "direction": passed.direction,
                    "class": passed.kind,
                    "bytes": int(passed.size_bytes),
                    "waited_s": passed.waited_s,
                }
                for passed in gpu.paths.passed()
            ],
        }


def _demotion(demotion: Demotion) -> Row:
    return asdict(demotion) | {"decided": _clock(demotion.decided_s)}


def _tier_name(tier: Tier) -> str:
    return tier.name.lower()


def _clock(moment_s: float) -> float:
    """Return the Unix time of a moment on the event loop's clock, which is the monotonic one."""
    return time.time() - time.monotonic() + moment_s
