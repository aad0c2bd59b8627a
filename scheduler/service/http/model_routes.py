"""The routes of models: which GPU holds which, and pin, unpin, prefetch, evict."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.errors import MalformedRequest, UnknownModel, UnknownName
from scheduler.service.driver import Driver
from scheduler.service.leadership.term import Office
from scheduler.service.survey import hosting_of
from scheduler.service.views.cluster_report import ModelRest, model_rests


@dataclass(frozen=True, slots=True)
class Holder:
    """A GPU that holds a model; a request last used the model there `used_ago_s` ago.

    `runtime` is `process` or `stream`, with as many models in the process (null and 0 before a
    model that loads has one); calls have this share of the GPU's multiprocessors.
    """

    gpu: GpuId
    memory_bytes: int
    used_ago_s: float
    leases: int
    waiting: int
    pinned: bool
    runtime: str | None
    process_models: int
    gpu_share: float


@dataclass(frozen=True, slots=True)
class ConfiguredRun:
    """Seconds of a run of so many requests, measured on so many virtual CPUs and parts of a GPU."""

    batch: int
    vcpus: int
    vgpus: int
    gpu_type: str
    run_s: float


@dataclass(frozen=True, slots=True)
class ModelShown:
    """One model: the memory it takes, its times, and where it is.

    `load_s` is by the tier it is loaded from, `run_s` by batch size and GPU type, `configured` by
    the configuration of the lease, where the policy gives leases one. `features` are declared or
    measured facts about it, by name. `functions` pay for what the cluster holds of it.
    """

    model: ModelId
    memory_bytes: int
    load_s: dict[str, float]
    run_s: dict[str, float]
    rate: float
    waiting: int
    configured: list[ConfiguredRun]
    holders: list[Holder]
    rests: list[ModelRest]
    features: dict[str, float]
    functions: list[str]


@dataclass(frozen=True, slots=True)
class OrderDone:
    """The order was carried out for the model of this full name."""

    model: ModelId
    done: str


Order = Callable[[Driver, ModelId, GpuId | None], Awaitable[None]]
_ORDERS: Mapping[str, tuple[Order, str]] = {
    "pin": (Driver.pin, "Keep a model in GPU memory"),
    "unpin": (Driver.unpin, "Let a pinned model be evicted again"),
    "prefetch": (Driver.prefetch, "Load a model ahead of its requests"),
    "evict": (Driver.evict, "Take a model out of GPU memory, where it is not in use"),
}
GpuAsked = Annotated[str | None, Query(description="on this GPU alone")]


def add_models(reads: APIRouter, orders: APIRouter, office: Callable[[], Office]) -> None:
    @reads.get("/models", tags=["models"], summary="Every model, and the GPUs that hold it")
    async def models() -> list[ModelShown]:
        leader = office()
        return [_shown(leader, model) for model in sorted(leader.core.cluster.profiles.known())]

    @reads.get("/models/{model:path}", tags=["models"], summary="One model, with its times")
    async def one_model(model: str) -> ModelShown:
        leader = office()
        return _shown(leader, _named(leader, model))

    for verb, (order, summary) in _ORDERS.items():
        path = f"/models/{{model:path}}/{verb}"
        orders.post(path, tags=["models"], summary=summary)(_obey(office, verb, order))


def _obey(
    office: Callable[[], Office], verb: str, order: Order
) -> Callable[..., Awaitable[OrderDone]]:
    async def obey(model: str, gpu: GpuAsked = None) -> OrderDone:
        leader = office()
        model_id = _named(leader, model)
        if gpu is not None and gpu not in leader.core.cluster.gpus:
            raise UnknownName("GPU", gpu)
        await order(leader.driver, model_id, None if gpu is None else GpuId(gpu))
        return OrderDone(model_id, verb)

    return obey


def _named(office: Office, name: str) -> ModelId:
    """Find a model by its id, the beginning of the id or of its last part, or a function."""
    profiles = office.core.cluster.profiles.known()
    if name in profiles:
        return ModelId(name)
    matches = [
        model
        for model in (profiles if name else ())
        if model.startswith(name)
        or model.rpartition("/")[2].startswith(name)
        or any(name in (user, user.rpartition("/")[2]) for user in office.bill.users(model))
    ]
    if not matches:
        raise UnknownModel(name)
    if len(matches) > 1:
        raise MalformedRequest(f"{name!r} may be any of {', '.join(sorted(matches))}")
    return matches[0]


def _shown(office: Office, model: ModelId) -> ModelShown:
    cluster, now_s = office.core.cluster, office.clock.now_s()
    profile = cluster.profiles.known()[model]
    caches = cluster.index.holders(model).values()
    residents = ((cache, cache.residents[model]) for cache in caches)
    lanes = (cluster.waiting.lanes.get(bundle) for bundle in cluster.bundles_of(model))
    return ModelShown(
        model=model,
        memory_bytes=profile.memory_bytes,
        load_s={tier.name.lower(): seconds for tier, seconds in sorted(profile.load_s.items())},
        run_s={f"{batch} on {kind}": s for (batch, kind), s in sorted(profile.run_s.items())},
        configured=[
            ConfiguredRun(*configuration, gpu_type, run_s)
            for (configuration, gpu_type), run_s in sorted(profile.configured_s.items())
        ],
        rate=cluster.index.rate(model, now_s),
        waiting=sum(lane.waiting for lane in lanes if lane is not None),
        holders=[
            Holder(
                gpu=cache.id,
                memory_bytes=resident.bytes,
                used_ago_s=now_s - resident.used_s,
                leases=resident.users,
                waiting=resident.waiters,
                pinned=resident.pinned,
                **hosting_of(cluster.gpus[cache.id], model)._asdict(),
            )
            for cache, resident in residents
        ],
        rests=model_rests(office.core, (model,), now_s),
        features=profile.features,
        functions=office.bill.users(model),
    )
