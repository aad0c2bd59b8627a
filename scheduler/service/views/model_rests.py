"""Where a model rests, stage by stage, and for how long it stays there if nobody uses it."""

from cache_manager.model.ids import ModelId
from cache_manager.routes import ModelRest
from scheduler.core.core import Core


def model_rests(core: Core, models: tuple[ModelId, ...], now_s: float) -> list[ModelRest]:
    """The stages that these models are in now, of each model those nearest to a GPU first."""
    return [
        ModelRest(
            model, stage.name.lower(), place, None if due_s is None else max(0.0, due_s - now_s)
        )
        for model in models
        for stage, place, due_s in core.exits.rests(model)
    ]
