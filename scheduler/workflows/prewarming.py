"""When the next invocation is expected, and whether an instance should be started for it."""

from dataclasses import dataclass

# The weight of the latest interval.
WEIGHT = 0.3


@dataclass(slots=True)
class IntervalForecast:
    """Exponentially weighted moving average of the intervals between invocations."""

    weight: float = WEIGHT
    last_s: float | None = None
    mean_s: float | None = None

    def observe(self, now: float) -> None:
        """An invocation came now."""
        if self.last_s is not None:
            interval_s = now - self.last_s
            known_s = interval_s if self.mean_s is None else self.mean_s
            self.mean_s = known_s + self.weight * (interval_s - known_s)
        self.last_s = now

    @property
    def next_s(self) -> float | None:
        """When the next invocation is expected; None before two have come."""
        if self.last_s is None or self.mean_s is None:
            return None
        return self.last_s + self.mean_s


def warms_another(forecast: IntervalForecast, ready: int, busy_until_s: float) -> bool:
    """Whether to start one more instance: the next call will find none idle.

    `ready` counts idle instances and those already starting.
    """
    expected_s = forecast.next_s
    return ready == 0 and expected_s is not None and expected_s < busy_until_s
