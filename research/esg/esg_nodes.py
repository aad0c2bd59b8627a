"""ESG's nodes: what is free, who is tried again, which instances are warm, or should be."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from scheduler.model.values import Configuration
from scheduler.workflows.node_choice import NodeRoom

# A queue that no configuration could serve so often gets the least one.
MOST_ROUNDS = 3
# The weight of the latest interval.
WEIGHT = 0.3


@dataclass(slots=True)
class Instances:
    """A function's instances on one node; each runs one batch at a time.

    An idle instance holds neither vCPU nor vGPU, and ends after the keep-alive time.
    """

    idle_until_s: deque[float] = field(default_factory=deque)
    starting: int = 0

    def is_warm(self, now: float) -> bool:
        """Whether an idle instance is there; those whose time is up are forgotten."""
        while self.idle_until_s and self.idle_until_s[0] <= now:
            self.idle_until_s.popleft()
        return bool(self.idle_until_s)

    def take(self, now: float) -> bool:
        """Use the instance that became idle last; False: none is idle, and a cold start follows."""
        if self.is_warm(now):
            self.idle_until_s.pop()
            return True
        return False

    @property
    def ready(self) -> int:
        """Idle ones, and those already starting."""
        return len(self.idle_until_s) + self.starting


@dataclass(slots=True)
class EsgNode:
    """One node; taking more than is free is a defect of whoever takes it."""

    vcpus: int
    vgpus: int
    instances: dict[str, Instances]

    def room(self, function: str, now: float) -> NodeRoom:
        """What is free, as one function sees it."""
        return NodeRoom(self.vcpus, self.vgpus, self.instances[function].is_warm(now))

    def hold(self, configuration: Configuration) -> None:
        """Take these resources."""
        self.vcpus -= configuration.vcpus
        self.vgpus -= configuration.vgpus
        assert self.vcpus >= 0
        assert self.vgpus >= 0

    def free(self, configuration: Configuration) -> None:
        """Give these resources back."""
        self.vcpus += configuration.vcpus
        self.vgpus += configuration.vgpus


@dataclass(slots=True)
class RecheckList:
    """Queues that found no room, and how often they were tried again since."""

    most_rounds: int = MOST_ROUNDS
    _rounds: dict[Hashable, int] = field(default_factory=dict)

    def __contains__(self, queue: Hashable) -> bool:
        return queue in self._rounds

    def enter(self, queue: Hashable) -> None:
        """Remember a queue for which there was no room."""
        self._rounds.setdefault(queue, 0)

    def try_again(self, queue: Hashable) -> bool:
        """Count one more try; whether it is time for the least configuration."""
        self._rounds[queue] += 1
        return self._rounds[queue] > self.most_rounds

    def leave(self, queue: Hashable) -> None:
        """Forget a queue that was served."""
        self._rounds.pop(queue, None)


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
