"""What has changed in the map of models since somebody looked."""

from cache_manager.model.ids import GpuId, ModelId


class IndexChanges:
    """GPUs with the models that changed there, and models whose stored weights changed."""

    __slots__ = ("gpus", "stored")

    def __init__(self) -> None:
        self.gpus: dict[GpuId, dict[ModelId, None]] = {}
        self.stored: dict[ModelId, None] = {}

    def note(self, gpu: GpuId, model: ModelId) -> None:
        """A model came to a GPU, left it, or has another size there."""
        models = self.gpus.get(gpu)
        if models is None:
            self.gpus[gpu] = {model: None}
        else:
            models[model] = None

    def note_gpu(self, gpu: GpuId) -> None:
        """A GPU came or left."""
        self.gpus.setdefault(gpu, {})
