"""Values of workflows: their names, their stages, and the plan that a file describes. Frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gateway_ext.model import FunctionId
from gateway_ext.workflows.plan.conditions import Condition
from scheduler.workflows.dag import Workflow

# Instead of a stage's name: the request that the workflow was called with.
REQUEST = "request"


class WorkflowId(NamedTuple):
    """A workflow's name in its namespace, in which all of its functions are."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}.{self.namespace}"


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One call of a function; it gets the answers of `sources`, stages or the request.

    A stage whose condition `when` is not met is skipped. Failed calls are made again `retries`
    times, first after `backoff_s`. The failure of an `optional` stage is an answer like others.
    With `each` the function is called for each element of its input, a JSON array; the answer is
    the array of its answers. With `by_handle` the function is asked to keep its result and to
    answer with a handle of it.
    """

    name: str
    function: FunctionId
    sources: tuple[str, ...]
    when: Condition | None = None
    retries: int = 0
    backoff_s: float = 0.1
    timeout_s: float | None = None
    optional: bool = False
    by_handle: bool = False
    each: bool = False

    @property
    def is_later(self) -> bool:
        """Whether it follows other stages."""
        return any(source != REQUEST for source in self.sources)

    @property
    def must_succeed(self) -> bool:
        """Whether each run calls it, once, and fails with it."""
        return self.when is None and not self.retries and not self.optional


@dataclass(frozen=True, slots=True)
class WorkflowPlan:
    """A workflow as its file describes it; `text` is the file.

    It should answer within `slo_s`, if that is given, and has failed after `timeout_s`.
    """

    id: WorkflowId
    stages: Mapping[str, PlannedStage]
    graph: Workflow
    timeout_s: float
    slo_s: float | None = None
    text: str = ""

    @property
    def last(self) -> tuple[str, ...]:
        """The stages for which no other waits: their answers are the workflow's."""
        return tuple(stage for stage in self.graph.order if not self.graph.after(stage))
