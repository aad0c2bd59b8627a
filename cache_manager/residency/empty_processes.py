"""Which of the empty processes on a GPU takes a model, and which end where memory is short."""

from collections.abc import Collection, Sequence

from cache_manager.model.ids import ModelId, tenant_of
from cache_manager.residency.gpu_cache import GpuCache, KeptContext


def context_for(
    cache: GpuCache, model: ModelId, taken: Collection[ModelId] = ()
) -> KeptContext | None:
    """The empty process that can take a model: the one that it left, or one of its tenant."""
    own = cache.contexts.get(model)
    if own is not None and model not in taken:
        return own
    tenant = tenant_of(model)
    for left, context in cache.contexts.items():
        if left not in taken and tenant_of(left) == tenant:
            return context
    return None


def idle_contexts(
    cache: GpuCache, short_bytes: int, taken: Collection[ModelId] = ()
) -> tuple[ModelId, ...]:
    """The empty processes that end first where memory is short, the oldest first; maybe too few."""
    chosen: list[ModelId] = []
    for left, context in cache.contexts.items():
        if short_bytes <= 0:
            break
        if context.bytes and left not in taken:
            chosen.append(left)
            short_bytes -= context.bytes
    return tuple(chosen)


def processes_for(cache: GpuCache, loads: Sequence[tuple[ModelId, int]]) -> dict[ModelId, ModelId]:
    """Which empty process takes which load: first every model's own, then those of its tenant."""
    found: dict[ModelId, ModelId] = {m: m for m, _ in loads if m in cache.contexts}
    for model, _ in loads:
        if model not in found:
            context = context_for(cache, model, found.values())
            if context is not None:
                found[model] = context.model
    return found
