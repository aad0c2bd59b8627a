"""Since when a session has asked for a lease, over questions that expired one after the other."""

from cache_manager.model.ids import ModelId

# Who asks again within this time has not stopped waiting.
_AT_ONCE_S = 1.0
_MOST_MODELS = 32


class ExpiredQuestions:
    """The questions of one session that expired a moment ago.

    The threads of a process ask for a model's lease by one question, which has the time of one
    call. When that is over, the next thread asks, whose call has waited for the same question.
    """

    def __init__(self) -> None:
        self._expired: dict[tuple[ModelId, ...], tuple[float, float]] = {}

    def asked_since_s(self, models: tuple[ModelId, ...], now_s: float) -> float:
        """Since when a question for these models that is asked now has been asked."""
        since_s, expired_s = self._expired.pop(models, (now_s, now_s))
        return since_s if now_s <= expired_s + _AT_ONCE_S else now_s

    def expired(self, models: tuple[ModelId, ...], since_s: float, now_s: float) -> None:
        """A question that was asked since then got no lease in its time."""
        self._expired[models] = since_s, now_s
        if len(self._expired) > _MOST_MODELS:
            del self._expired[next(iter(self._expired))]
