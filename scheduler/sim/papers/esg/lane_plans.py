"""What a scheduler of workflows is to the simulation: how it queues, plans and places calls."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from scheduler.model.values import Configuration
from scheduler.sim.papers.esg.printed_esg import Application
from scheduler.workflows.node_choice import NodeChoice, NodeRoom


@dataclass(slots=True, eq=False)
class WorkflowCall:
    """One call of an application, at one of its stages; `node` ran the stage before."""

    application: Application
    number: int
    arrived_s: float
    slo_s: float
    stage: int = 0
    node: int | None = None
    cost: float = 0.0
    ended_s: float = inf

    @property
    def function(self) -> str:
        """The function of its stage."""
        return self.application.stages[self.stage]

    @property
    def due_s(self) -> float:
        """When it should have ended."""
        return self.arrived_s + self.slo_s


class LanePlan(NamedTuple):
    """Configurations for the first calls of a lane, in the order in which they are to be tried.

    `search_s`: how long the scheduler thought. `wait_until_s`: dispatch nothing before then, unless
    another call comes. `calls`: which calls these are, if not those that came first. `local`: for
    each option, whether it is for the preferred node alone. `missed`: a configuration planned
    earlier did not apply, since fewer calls wait than its batch.
    """

    options: tuple[Configuration, ...]
    search_s: float = 0.0
    wait_until_s: float | None = None
    calls: tuple[WorkflowCall, ...] = ()
    local: tuple[bool, ...] = ()
    missed: bool | None = None


class LanePlanner(Protocol):
    """A scheduler under test. `replans`: a lane without room is planned anew when room is freed."""

    @property
    def name(self) -> str: ...

    @property
    def replans(self) -> bool: ...

    def lane(self, call: WorkflowCall) -> Hashable:
        """Calls of one lane may run together."""
        ...

    def arrived(self, call: WorkflowCall, now: float) -> None:
        """A call has joined its lane."""
        ...

    def urgency(self, waiting: Sequence[WorkflowCall], now: float) -> float:
        """Lanes of the lowest value come first; equal ones take turns."""
        ...

    def plan(self, waiting: Sequence[WorkflowCall], now: float) -> LanePlan:
        """What to do with the calls that wait in one lane."""
        ...

    def place(
        self, plan: LanePlan, function: str, rooms: Sequence[NodeRoom], preferred: int
    ) -> NodeChoice | None:
        """Where, and in which configuration; None where no room is enough."""
        ...
