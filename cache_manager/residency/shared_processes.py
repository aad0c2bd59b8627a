"""Processes with several models of a tenant: what each model's part of their memory is."""

from collections.abc import Sequence

from cache_manager.model.ids import ModelId, tenant_of
from cache_manager.residency.gpu_cache import GpuCache, SharedProcess
from cache_manager.residency.index_changes import IndexChanges


def part_of(cache: GpuCache, model: ModelId) -> int:
    """A model's part of the memory of the process that it shares, equal for all models in it.

    Odd bytes belong to the first models, so that the parts are the whole.
    """
    process = process_of(cache, model)
    if process is None:
        return 0
    each, rest = divmod(process.bytes, len(process.models))
    return each + 1 if list(process.models).index(model) < rest else each


def process_of(cache: GpuCache, model: ModelId) -> SharedProcess | None:
    """The process that a model shares, or would share with further ones; None if it is alone."""
    process = cache.shared.get(tenant_of(model)) if cache.shared else None
    return process if process is not None and model in process.models else None


def replace_shared(
    cache: GpuCache,
    processes: Sequence[tuple[int, Sequence[ModelId]]],
    changes: IndexChanges | None,
) -> None:
    """A node reports the memory of its shared processes, and the models in each."""
    _note(cache, changes)
    cache.shared.clear()
    for size_bytes, models in processes:
        there = [model for model in models if model in cache.residents]
        if there:
            cache.shared[tenant_of(there[0])] = SharedProcess(size_bytes, there)
    _note(cache, changes)


def join(cache: GpuCache, model: ModelId, changes: IndexChanges | None) -> None:
    """A resident model is in its tenant's shared process, if that is known."""
    process = cache.shared.get(tenant_of(model))
    if process is not None and model in cache.residents:
        process.models[model] = None
        _note(cache, changes)


def leave(cache: GpuCache, model: ModelId, changes: IndexChanges | None) -> None:
    """A model has left its GPU; the process of a last one has no models until it is reported."""
    process = cache.shared.get(tenant_of(model))
    if process is not None and model in process.models:
        del process.models[model]
        _note(cache, changes)


def _note(cache: GpuCache, changes: IndexChanges | None) -> None:
    """What these models' parts are has changed, for who counts memory over time."""
    if changes is not None:
        for process in cache.shared.values():
            for model in process.models:
                changes.note(cache.id, model)
