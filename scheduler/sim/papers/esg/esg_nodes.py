"""The nodes of ESG's testbed: what is free on them, and which instances are warm."""

from collections import deque
from dataclasses import dataclass, field

from scheduler.model.values import Configuration
from scheduler.workflows.node_choice import NodeRoom


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
