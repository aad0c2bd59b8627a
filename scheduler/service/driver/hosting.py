"""How a resident model is hosted: its runtime, what shares its process, its share of the GPU."""

from typing import NamedTuple

from cache_manager.model.ids import ModelId
from cache_manager.residency.gpu_cache import process_of
from common.gpu_wishes import PROCESS, STREAM, WHOLE
from scheduler.core.state.slots import Gpu


class Hosting(NamedTuple):
    """The runtime (None before a model that loads has a process) and the models in its process.

    Calls have this share of the GPU's multiprocessors.
    """

    runtime: str | None
    process_models: int
    gpu_share: float


def hosting_of(gpu: Gpu, model: ModelId) -> Hosting:
    """How this resident of the GPU is hosted, as its node reported."""
    process = process_of(gpu.cache, model)
    if process is not None:
        runtime, process_models = STREAM, len(process.models)
    elif model in gpu.loads:
        return Hosting(None, 0, WHOLE)
    else:
        runtime, process_models = PROCESS, 1
    return Hosting(runtime, process_models, gpu.cache.residents[model].gpu_share)
