"""How often each model was requested lately, as an average that fades with time."""

from math import exp

from cache_manager.model.ids import ModelId

# Requests count less with age: by the factor e after this many seconds.
DEMAND_SPAN_S = 60.0
_FADED_AFTER_SPANS = 10


class RequestRates:
    """Requests a second for each model."""

    __slots__ = ("_amounts",)

    def __init__(self) -> None:
        self._amounts: dict[ModelId, tuple[float, float]] = {}

    def count_request(self, model: ModelId, now: float) -> None:
        """One more request for `model` has come in."""
        amount, at_s = self._amounts.get(model, (0.0, now))
        if at_s != now:
            amount *= exp((at_s - now) / DEMAND_SPAN_S)
        self._amounts[model] = (amount + 1.0, now)

    def rate(self, model: ModelId, now: float) -> float:
        """Requests for `model` a second, lately."""
        amount, at_s = self._amounts.get(model, (0.0, now))
        return amount * exp((at_s - now) / DEMAND_SPAN_S) / DEMAND_SPAN_S

    def forget(self, model: ModelId) -> None:
        """Forget the requests for `model`."""
        self._amounts.pop(model, None)

    def __len__(self) -> int:
        return len(self._amounts)

    def forget_faded(self, now: float) -> None:
        """Drop the models whose requests are so old that they hardly count any more."""
        faded_before_s = now - _FADED_AFTER_SPANS * DEMAND_SPAN_S
        self._amounts = {
            model: found for model, found in self._amounts.items() if found[1] > faded_before_s
        }
