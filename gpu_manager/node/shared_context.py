"""The process in which models of one tenant are, as memory: its context, and room for calls; pure.

The memory of a call is free again when the call ends. So a process of many models needs it as often
as calls may overlap, and not for each model.
"""

from dataclasses import dataclass, field

from cache_manager.model.ids import ModelId


@dataclass(slots=True)
class SharedContext:
    """What a tenant's process takes beside what its models hold between calls."""

    context_bytes: int
    models: int = 0
    _calls: dict[ModelId, int] = field(default_factory=dict)  # the most that a call took

    def bytes(self, calls_at_once: int) -> int:
        """The context, and what is needed for calls."""
        return self.context_bytes + self.for_calls_bytes(calls_at_once)

    def for_calls_bytes(self, calls_at_once: int) -> int:
        """The most that so many calls of different models take at once, as far as is known."""
        return sum(sorted(self._calls.values(), reverse=True)[:calls_at_once])

    def ran(self, model: ModelId, call_bytes: int) -> None:
        """A call of this model took so much beyond what the model holds."""
        self._calls[model] = max(self._calls.get(model, 0), call_bytes)

    def leave(self, model: ModelId) -> None:
        """A model has left the process."""
        self.models -= 1
        self._calls.pop(model, None)
