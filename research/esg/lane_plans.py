"""What a scheduler of workflows is to the simulation: how it queues, plans and places calls."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from research.esg.applications import Application
from research.esg.node_choice import NodeChoice, NodeRoom
from scheduler.model.values import Configuration


@dataclass(slots=True, eq=False)
class WorkflowCall:
    """One call of an application; `unmet`: stages whose condition it does not meet.

    `nodes`: where each stage ran that has ended; None for one that was skipped. `begun`: the stages
    that wait no more for those before them.
    """

    application: Application
    number: int
    arrived_s: float
    slo_s: float
    unmet: frozenset[str] = frozenset()
    cost: float = 0.0
    ended_s: float = inf
    nodes: dict[str, int | None] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    @property
    def due_s(self) -> float:
        """When it should have ended."""
        return self.arrived_s + self.slo_s

    def entries(self) -> "list[StageCall]":
        """What it begins with."""
        return [self._at(stage, (None,)) for stage in self.application.entries]

    def after(self, stage: str, node: int | None) -> "list[StageCall]":
        """What begins as this stage has ended on a node (None: it was skipped).

        A stage waits for all before it. It is skipped where its condition is not met, or where all
        before it were skipped.
        """
        self.nodes[stage] = node
        graph, begins = self.application.graph, []
        for following in graph.after(stage):
            before = graph.before(following)
            if following in self.begun or not all(each in self.nodes for each in before):
                continue
            self.begun.add(following)
            inputs = tuple(made for each in before if (made := self.nodes[each]) is not None)
            if following in self.unmet or not inputs:
                begins.extend(self.after(following, None))
            else:
                begins.append(self._at(following, inputs))
        return begins

    @property
    def is_over(self) -> bool:
        """Whether each stage has ended or was skipped."""
        return len(self.nodes) == len(self.application.stages)

    def _at(self, stage: str, inputs: tuple[int | None, ...]) -> "StageCall":
        return StageCall(self, self.application.stages.index(stage), inputs)


@dataclass(slots=True, eq=False)
class StageCall:
    """A call at one of its stages: what waits in a lane.

    `inputs`: the node that made each of its inputs; None for an input that came with the call.
    `node`: that of most of them, the first such one.
    """

    call: WorkflowCall
    stage: int = 0
    inputs: tuple[int | None, ...] = (None,)
    node: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.node = max(self.inputs, key=self.inputs.count)

    @property
    def application(self) -> Application:
        """What is called."""
        return self.call.application

    @property
    def function(self) -> str:
        """The function of its stage."""
        return self.call.application.stages[self.stage]

    @property
    def slo_s(self) -> float:
        """How long the whole call may take."""
        return self.call.slo_s

    @property
    def due_s(self) -> float:
        """When the whole call should have ended."""
        return self.call.due_s


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
    calls: tuple[StageCall, ...] = ()
    local: tuple[bool, ...] = ()
    missed: bool | None = None


class LanePlanner(Protocol):
    """A scheduler under test. `replans`: a lane without room is planned anew when room is freed."""

    @property
    def name(self) -> str: ...

    @property
    def replans(self) -> bool: ...

    def lane(self, call: StageCall) -> Hashable:
        """Calls of one lane may run together."""
        ...

    def arrived(self, call: StageCall, now: float) -> None:
        """A call has joined its lane."""
        ...

    def urgency(self, waiting: Sequence[StageCall], now: float) -> float:
        """Lanes of the lowest value come first; equal ones take turns."""
        ...

    def plan(self, waiting: Sequence[StageCall], now: float) -> LanePlan:
        """What to do with the calls that wait in one lane."""
        ...

    def place(
        self, plan: LanePlan, function: str, rooms: Sequence[NodeRoom], preferred: int
    ) -> NodeChoice | None:
        """Where, and in which configuration; None where no room is enough."""
        ...
