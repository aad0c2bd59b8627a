"""The graph of a workflow: checked when made, with its order."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

# Bounds of what a file may say; longer ones have no use that we know, and cost the search.
MOST_STAGES = 64
MOST_EDGES = 512


@dataclass(frozen=True, slots=True)
class Workflow:
    """Stages and who waits for whom; one that exists has no cycle, and names only its stages.

    `order` lists the stages such that each comes after all that it waits for.
    """

    name: str
    stages: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    order: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_names(self)
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


def _check_names(workflow: Workflow) -> None:
    if not workflow.stages:
        raise BadWorkflow(workflow.name, "it has no stage")
    if len(workflow.stages) > MOST_STAGES:
        raise BadWorkflow(workflow.name, f"it has more than {MOST_STAGES} stages")
    if len(workflow.edges) > MOST_EDGES:
        raise BadWorkflow(workflow.name, f"it has more than {MOST_EDGES} edges")
    stages = set(workflow.stages)
    if len(stages) < len(workflow.stages):
        twice = next(name for name in workflow.stages if workflow.stages.count(name) > 1)
        raise BadWorkflow(workflow.name, f"the stage {twice} is listed twice")
    if len(set(workflow.edges)) < len(workflow.edges):
        raise BadWorkflow(workflow.name, "an edge is listed twice")
    for edge in workflow.edges:
        unknown = [stage for stage in edge if stage not in stages]
        if unknown:
            raise BadWorkflow(workflow.name, f"an edge names the unknown stage {unknown[0]}")


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


class WorkflowError(Exception):
    """Base of every error about a workflow."""


class BadWorkflow(WorkflowError):
    """The graph of a workflow has a defect; `stage` is where, if it is one stage's."""

    def __init__(self, workflow: str, reason: str, stage: str = "") -> None:
        super().__init__(f"workflow {workflow}: {reason}")
        self.workflow = workflow
        self.reason = reason
        self.stage = stage


class BadProfile(WorkflowError):
    """A stage's profile is empty, or has a time or batch that is not positive."""
