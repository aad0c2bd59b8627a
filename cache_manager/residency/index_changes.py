"""What has changed in the map of models since somebody looked."""

from cache_manager.model.ids import GpuId, ModelId
from cache_manager.residency.gpu_cache import GpuCache


class IndexChanges:
    """GPUs whose contents changed, and models whose stored weights did, until `clear`."""

    __slots__ = ("gpus", "models")

    def __init__(self) -> None:
        self.gpus: dict[GpuId, GpuCache] = {}
        self.models: dict[ModelId, None] = {}

    def clear(self) -> None:
        """Everything was seen."""
        self.gpus.clear()
        self.models.clear()
