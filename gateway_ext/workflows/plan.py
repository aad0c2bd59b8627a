"""What a workflow is, read from `workflow.yml`: each problem of a bad file with its line; pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gateway_ext.errors import BadRequest, BadWorkflowFile, UnknownFunction
from gateway_ext.model import DEFAULT_NAMESPACE, FunctionId
from gateway_ext.openfaas import valid_names
from gateway_ext.workflows.conditions import BadCondition, Condition, condition
from gateway_ext.workflows.yaml_lines import Problems, YamlTable, yaml_table
from scheduler.workflows.dag import MOST_EDGES, MOST_STAGES, BadWorkflow, Workflow

MOST_RETRIES = 10
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_TIMEOUT_MS = 300_000
_BACKOFF_MS = 100
_WHOLE = ("workflow", "namespace", "slo_ms", "timeout_ms", "stages")
_STAGE = (
    *("function", "after", "when", "retries", "backoff_ms", "timeout_ms", "optional"),
    *("by_handle", "each"),
)


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


def read_workflow(
    text: str, is_deployed: Callable[[FunctionId], bool] = lambda _: True
) -> WorkflowPlan:
    """The plan of a file; BadWorkflowFile lists what is wrong, unknown functions too."""
    problems = Problems()
    whole = yaml_table(text, "the workflow", problems)
    plan = None if whole is None else _File(whole, problems, is_deployed).plan(text)
    if plan is None or problems:
        raise BadWorkflowFile(problems.text)
    return plan


class _File:
    def __init__(
        self, whole: YamlTable, problems: Problems, is_deployed: Callable[[FunctionId], bool]
    ) -> None:
        self._whole = whole
        self._problems = problems
        self._is_deployed = is_deployed

    def plan(self, text: str) -> WorkflowPlan | None:
        whole = self._whole
        whole.only(*_WHOLE)
        namespace = self._name("namespace", whole.text("namespace") or DEFAULT_NAMESPACE)
        name = self._name("workflow", whole.text("workflow") or "")
        slo_ms = whole.whole("slo_ms", 1, _DAY_MS)
        timeout_ms = whole.whole("timeout_ms", 1, _DAY_MS) or _TIMEOUT_MS
        listed = whole.table("stages")
        if listed is None or not list(listed):
            whole.wrong("stages", "must list a stage")
            return None
        if len(list(listed)) > MOST_STAGES:
            whole.wrong("stages", f"are more than {MOST_STAGES}")
            return None
        names = [stage for stage in listed if self._is_stage_name(listed, stage)]
        tables = {stage: table for stage in names if (table := listed.table(stage)) is not None}
        stages = {
            stage: self._stage(stage, table, namespace, names) for stage, table in tables.items()
        }
        graph = self._graph(name, stages, listed)
        if graph is None or self._problems:
            return None
        return WorkflowPlan(
            id=WorkflowId(namespace, name),
            stages=stages,
            graph=graph,
            timeout_s=timeout_ms / 1000,
            slo_s=None if slo_ms is None else slo_ms / 1000,
            text=text,
        )

    def _name(self, key: str, name: str) -> str:
        try:
            return valid_names.workflow_name(key, name)
        except BadRequest as error:
            self._whole.refuse(key, error)
            return name

    def _is_stage_name(self, listed: YamlTable, name: str) -> bool:
        try:
            valid_names.workflow_name("stage", name)
        except BadRequest as error:
            self._problems.add(listed.line_of(name), str(error))
            return False
        if name == REQUEST:
            listed.wrong(name, "is the name of what the workflow is called with")
            return False
        return True

    def _stage(self, name: str, table: YamlTable, namespace: str, names: list[str]) -> PlannedStage:
        table.only(*_STAGE)
        sources = self._sources(name, table, names)
        timeout_ms = table.whole("timeout_ms", 1, _DAY_MS)
        backoff_ms = table.whole("backoff_ms", 0, _HOUR_MS)
        return PlannedStage(
            name=name,
            function=self._function(table, namespace),
            sources=sources,
            when=self._condition(table, sources),
            retries=table.whole("retries", 0, MOST_RETRIES) or 0,
            backoff_s=(_BACKOFF_MS if backoff_ms is None else backoff_ms) / 1000,
            timeout_s=None if timeout_ms is None else timeout_ms / 1000,
            optional=table.truth("optional") or False,
            by_handle=table.truth("by_handle") or False,
            each=table.truth("each") or False,
        )

    def _function(self, table: YamlTable, namespace: str) -> FunctionId:
        name = table.text("function")
        try:
            function = valid_names.function_id(name or "", namespace)
        except BadRequest as error:
            table.refuse("function", error)
            return FunctionId(namespace, name or "")
        if not self._is_deployed(function):
            table.refuse("function", UnknownFunction(function))
        return function

    def _sources(self, name: str, table: YamlTable, names: list[str]) -> tuple[str, ...]:
        sources = table.texts("after")
        if not sources:
            return (REQUEST,)
        for source in sources:
            if source != REQUEST and source not in names:
                table.wrong("after", f"names the unknown stage {source[:80]}")
        if len(set(sources)) < len(sources):
            table.wrong("after", "names a stage twice")
        if name in sources:
            table.wrong("after", "names the stage itself")
        return sources

    def _condition(self, table: YamlTable, sources: tuple[str, ...]) -> Condition | None:
        text = table.text("when")
        if text is None:
            return None
        try:
            return condition(text, sources)
        except BadCondition as error:
            table.refuse("when", error)
            return None

    def _graph(
        self, name: str, stages: Mapping[str, PlannedStage], listed: YamlTable
    ) -> Workflow | None:
        """The graph of the sources that are stages: the others are told already."""
        edges = tuple(
            (source, stage.name)
            for stage in stages.values()
            for source in dict.fromkeys(stage.sources)
            if source in stages and source != stage.name
        )
        if not stages:
            return None
        if len(edges) > MOST_EDGES:
            self._whole.wrong("stages", f"wait for others more than {MOST_EDGES} times")
            return None
        try:
            return Workflow(name, tuple(stages), edges)
        except BadWorkflow as error:
            line = listed.line_of(error.stage) if error.stage else listed.line
            self._problems.add(line, error.reason)
            return None
