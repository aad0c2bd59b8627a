"""The cache manager's routes: which GPU holds which model, and pin, unpin, prefetch, evict."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query

from cache_manager.model.ids import GpuId, ModelId


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
class ModelRest:
    """A stage that a model is in: `gpu`, `context` (an empty process that it left), `host`, `disk`.

    If nobody uses it, it may leave the stage in `leaves_in_s`; None: in use there, or for ever.
    """

    model: ModelId
    stage: str
    place: str
    leaves_in_s: float | None


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
    configured: list[ConfiguredRun] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    rests: list[ModelRest] = field(default_factory=list)
    features: dict[str, float] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OrderDone:
    """The order was carried out for the model of this full name."""

    model: ModelId
    done: str


class Residency(Protocol):
    """The cache of the leading scheduler; an order that cannot be carried out raises an error."""

    def models(self) -> list[ModelShown]:
        """Every model that was declared, requested or reported."""

    def model(self, model: ModelId) -> ModelShown: ...

    def named(self, name: str) -> ModelId:
        """The one model with this name, or whose name begins with it, or of this function."""

    async def pin(self, model: ModelId, gpu: GpuId | None) -> None: ...
    async def unpin(self, model: ModelId, gpu: GpuId | None) -> None: ...
    async def prefetch(self, model: ModelId, gpu: GpuId | None) -> None: ...
    async def evict(self, model: ModelId, gpu: GpuId | None) -> None: ...


def router(residency: Residency, view: Sequence[Any], change: Sequence[Any]) -> APIRouter:
    """The routes; `view` and `change` are dependencies: who may look, and who may act."""
    routes = APIRouter(tags=["models"])

    @routes.get("/models", dependencies=view, summary="Every model, and the GPUs that hold it")
    async def models() -> list[ModelShown]:
        return residency.models()

    @routes.get("/models/{model:path}", dependencies=view, summary="One model, with its times")
    async def one_model(model: str) -> ModelShown:
        return residency.model(residency.named(model))

    orders = {
        "pin": (residency.pin, "Keep a model in GPU memory"),
        "unpin": (residency.unpin, "Let a pinned model be evicted again"),
        "prefetch": (residency.prefetch, "Load a model ahead of its requests"),
        "evict": (residency.evict, "Take a model out of GPU memory, where it is not in use"),
    }
    for verb, (order, summary) in orders.items():
        path = f"/models/{{model:path}}/{verb}"
        routes.post(path, dependencies=change, summary=summary)(_obey(residency, verb, order))
    return routes


Order = Callable[[ModelId, GpuId | None], Awaitable[None]]
GpuAsked = Annotated[str | None, Query(description="on this GPU alone")]


def _obey(residency: Residency, verb: str, order: Order) -> Callable[..., Awaitable[OrderDone]]:
    async def obey(model: str, gpu: GpuAsked = None) -> OrderDone:
        model_id = residency.named(model)
        await order(model_id, None if gpu is None else GpuId(gpu))
        return OrderDone(model_id, verb)

    return obey
