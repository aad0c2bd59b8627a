"""Requests, models, GPUs and cores with defaults, so that a test names only what it is about."""

from collections.abc import Iterable, Mapping

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.model.events import GpuJoined, GpuSnapshot, ModelRegistered, NodeSnapshot
from scheduler.model.values import (
    ANY_GPU_TYPE,
    CoreSettings,
    GpuSpec,
    ModelSpec,
    Request,
    RequestId,
    SlotId,
    SlotSpec,
)

GIB = 1024 * MIB


def gpu(
    name: str,
    *,
    memory_mb: int = 8192,
    node: str | None = None,
    gpu_type: str = ANY_GPU_TYPE,
    slots: int = 1,
    leases: int = 1,
    at_once: bool = False,
    context_mb: int = 0,
    vcpus: int = 0,
) -> GpuSpec:
    """A GPU on a node of its own; with several slots these are called `<name>.0`, `<name>.1`..."""
    ids = [name] if slots == 1 else [f"{name}.{number}" for number in range(slots)]
    return GpuSpec(
        id=GpuId(name),
        node=NodeId(node or f"node-of-{name}"),
        memory_bytes=memory_mb * MIB,
        gpu_type=gpu_type,
        slots=tuple(SlotSpec(SlotId(slot), leases, at_once) for slot in ids),
        context_bytes=context_mb * MIB,
        vcpus=vcpus,
    )


def model(
    name: str,
    *,
    memory_mb: int | None = 1024,
    load_s: float | Mapping[Tier, float] = 2.0,
    run_s: float | Mapping[tuple[int, str], float] = 1.0,
) -> ModelSpec:
    """A model; plain seconds hold for a load from nowhere and a run of one on any GPU."""
    runs = run_s if isinstance(run_s, Mapping) else {(1, ANY_GPU_TYPE): run_s}
    return ModelSpec(
        id=ModelId(name),
        memory_bytes=None if memory_mb is None else memory_mb * MIB,
        load_s=load_s if isinstance(load_s, Mapping) else {Tier.ABSENT: load_s},
        run_s=tuple((*key, seconds) for key, seconds in runs.items()),
    )


def request(
    name: str,
    *models: str,
    batch: int = 1,
    deadline_s: float | None = None,
    arrived_s: float | None = None,
    priority: int = 0,
    max_wait_s: float | None = None,
    near: str | None = None,
) -> Request:
    """A request for these models (for bert, where none is named)."""
    return Request(
        id=RequestId(name),
        function=f"function-of-{name}",
        models=tuple(ModelId(each) for each in models or ("bert",)),
        batch=batch,
        deadline_s=deadline_s,
        arrived_s=arrived_s,
        priority=priority,
        max_wait_s=max_wait_s,
        near=None if near is None else NodeId(near),
    )


def a_core(
    policy: str = "lalbo3",
    *,
    gpus: Iterable[GpuSpec | str] = ("g0",),
    models: Iterable[ModelSpec | str] = ("bert",),
    rule: str = "lru",
    parameters: Mapping[str, float] | None = None,
    settings: CoreSettings | None = None,
) -> Core:
    """A core at time 0 with these GPUs, empty, and these models; a mere name takes the defaults."""
    core = make_core(policy, rule, parameters, settings)
    for each in models:
        core.handle(ModelRegistered(model(each) if isinstance(each, str) else each), 0.0)
    for spec in gpus:
        core.handle(GpuJoined(gpu(spec) if isinstance(spec, str) else spec), 0.0)
    return core


def holding(spec: GpuSpec, *residents: ModelSpec | str) -> NodeSnapshot:
    """The report of a node whose one GPU holds these models, least recently used first."""
    specs = [model(each) if isinstance(each, str) else each for each in residents]
    sizes = tuple((each.id, each.memory_bytes or GIB) for each in specs)
    return NodeSnapshot(spec.node, (GpuSnapshot(spec, sizes),))
