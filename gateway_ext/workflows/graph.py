"""The graph of a workflow, with its order; pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Workflow:
    """Stages and who waits for whom, nothing twice; one that exists has no cycle.

    `order` lists the stages such that each comes after all that it waits for.
    """

    name: str
    stages: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    order: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", _ordered(self))

    def after(self, stage: str) -> tuple[str, ...]:
        """The stages that wait for this one, in the order of the edges."""
        return tuple(to for start, to in self.edges if start == stage)

    def before(self, stage: str) -> tuple[str, ...]:
        return tuple(start for start, to in self.edges if to == stage)

    def longest(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """For each stage the weight of the heaviest path that begins with it."""
        heaviest: dict[str, float] = {}
        for stage in reversed(self.order):
            rest = max((heaviest[follower] for follower in self.after(stage)), default=0.0)
            heaviest[stage] = weights[stage] + rest
        return heaviest


def _ordered(workflow: Workflow) -> tuple[str, ...]:
    waits = {stage: len(workflow.before(stage)) for stage in workflow.stages}
    ready = deque(stage for stage in workflow.stages if not waits[stage])
    order: list[str] = []
    while ready:
        stage = ready.popleft()
        order.append(stage)
        for follower in workflow.after(stage):
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    if len(order) < len(workflow.stages):
        around = _cycle(workflow, frozenset(workflow.stages).difference(order))
        raise BadWorkflow(workflow.name, f"it has the cycle {' -> '.join(around)}", around[0])
    return tuple(order)


def _cycle(workflow: Workflow, left: frozenset[str]) -> list[str]:
    """A cycle among the stages that never became ready: each of them waits for another one."""
    path = [min(left)]
    while True:
        above = min(stage for stage in workflow.before(path[-1]) if stage in left)
        if above in path:
            return [above, *reversed(path[path.index(above) :])]
        path.append(above)


class BadWorkflow(Exception):
    """The graph of a workflow has a cycle; `stage` is in it."""

    def __init__(self, workflow: str, reason: str, stage: str) -> None:
        super().__init__(f"workflow {workflow}: {reason}")
        self.reason = reason
        self.stage = stage
