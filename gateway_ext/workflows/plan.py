"""What a workflow is, read from `workflow.yml`: each problem of a bad file with its line; pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from gateway_ext.errors import BadRequest, UnknownFunction
from gateway_ext.model import DEFAULT_NAMESPACE, FunctionId
from gateway_ext.openfaas import valid_names
from gateway_ext.workflows.conditions import BadCondition, Condition, condition
from gateway_ext.workflows.errors import BadWorkflowFile
from gateway_ext.workflows.graph import BadWorkflow, Workflow
from gateway_ext.workflows.yaml_lines import Problems, YamlTable, yaml_table

MOST_RETRIES = 10
_MOST_STAGES = 64
_MOST_EDGES = 512
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_TIMEOUT_MS = 300_000
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
    """One call of a function."""

    name: str
    function: FunctionId
    sources: tuple[str, ...]  # stages or the request, whose answers it gets
    when: Condition | None = None  # it is skipped unless this is met
    retries: int = 0  # how often a failed call is made again
    backoff_s: float = 0.1  # before the first of them
    timeout_s: float | None = None
    optional: bool = False  # its failure is an answer like others
    by_handle: bool = False  # the function is asked to keep its result, and for a handle of it
    each: bool = False  # called for each element of an array; the array of the answers is its own

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
    """A workflow as its file describes it."""

    id: WorkflowId
    stages: Mapping[str, PlannedStage]
    graph: Workflow
    timeout_s: float  # after which it has failed
    slo_s: float | None = None  # within which it should answer
    text: str = ""  # the file

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


_MostMs = Annotated[int, msgspec.Meta(ge=1, le=_DAY_MS)]  # 0, which no file may say, is none


class _FileFields(msgspec.Struct, frozen=True):
    workflow: str = ""
    namespace: str = DEFAULT_NAMESPACE
    slo_ms: _MostMs = 0
    timeout_ms: _MostMs = _TIMEOUT_MS
    stages: dict[str, Any] = {}


class _StageFields(msgspec.Struct, frozen=True):
    function: str = ""
    after: str | tuple[str, ...] = ()
    when: str | msgspec.UnsetType = msgspec.UNSET  # a null is refused
    retries: Annotated[int, msgspec.Meta(ge=0, le=MOST_RETRIES)] = 0
    backoff_ms: Annotated[int, msgspec.Meta(ge=0, le=_HOUR_MS)] = 100
    timeout_ms: _MostMs = 0
    optional: bool = False
    by_handle: bool = False
    each: bool = False


@dataclass(frozen=True, slots=True)
class _File:
    whole: YamlTable
    problems: Problems
    is_deployed: Callable[[FunctionId], bool]

    def plan(self, text: str) -> WorkflowPlan | None:
        fields = self.whole.fields(_FileFields)
        if fields is None:
            return None
        namespace = self._name("namespace", fields.namespace or DEFAULT_NAMESPACE)
        name = self._name("workflow", fields.workflow)
        listed = self.whole.get("stages")
        if not listed or not isinstance(listed, YamlTable):
            self.whole.wrong("stages", "must list a stage")
            return None
        if len(listed) > _MOST_STAGES:
            self.whole.wrong("stages", f"are more than {_MOST_STAGES}")
            return None
        names = [stage for stage in listed if self._is_stage_name(listed, stage)]
        read = (self._stage(stage, listed, namespace, names) for stage in names)
        stages = {stage.name: stage for stage in read if stage is not None}
        graph = self._graph(name, stages, listed)
        if graph is None or self.problems:
            return None
        return WorkflowPlan(
            id=WorkflowId(namespace, name),
            stages=stages,
            graph=graph,
            timeout_s=fields.timeout_ms / 1000,
            slo_s=fields.slo_ms / 1000 or None,
            text=text,
        )

    def _name(self, key: str, name: str) -> str:
        try:
            return valid_names.workflow_name(key, name)
        except BadRequest as error:
            self.whole.refuse(key, error)
            return name

    def _is_stage_name(self, listed: YamlTable, name: str) -> bool:
        try:
            valid_names.workflow_name("stage", name)
        except BadRequest as error:
            self.problems.add(listed.line_of(name), str(error))
            return False
        if name == REQUEST:
            listed.wrong(name, "is the name of what the workflow is called with")
        return name != REQUEST

    def _stage(
        self, name: str, listed: YamlTable, namespace: str, names: list[str]
    ) -> PlannedStage | None:
        table = listed[name]
        if not isinstance(table, YamlTable):
            listed.wrong(name, "must be a mapping")
            return None
        fields = table.fields(_StageFields)
        if fields is None:
            return None
        sources = self._sources(name, table, fields.after, names)
        return PlannedStage(
            name=name,
            function=self._function(table, fields.function, namespace),
            sources=sources,
            when=self._condition(table, fields.when, sources),
            retries=fields.retries,
            backoff_s=fields.backoff_ms / 1000,
            timeout_s=fields.timeout_ms / 1000 or None,
            optional=fields.optional,
            by_handle=fields.by_handle,
            each=fields.each,
        )

    def _function(self, table: YamlTable, name: str, namespace: str) -> FunctionId:
        try:
            function = valid_names.function_id(name, namespace)
        except BadRequest as error:
            table.refuse("function", error)
            return FunctionId(namespace, name)
        if not self.is_deployed(function):
            table.refuse("function", UnknownFunction(function))
        return function

    def _sources(
        self, name: str, table: YamlTable, after: str | tuple[str, ...], names: list[str]
    ) -> tuple[str, ...]:
        sources = (after,) if isinstance(after, str) else after
        for source in sources:
            if source != REQUEST and source not in names:
                table.wrong("after", f"names the unknown stage {source[:80]}")
        if len(set(sources)) < len(sources):
            table.wrong("after", "names a stage twice")
        if name in sources:
            table.wrong("after", "names the stage itself")
        return sources or (REQUEST,)

    def _condition(
        self, table: YamlTable, text: str | msgspec.UnsetType, sources: tuple[str, ...]
    ) -> Condition | None:
        if text is msgspec.UNSET:
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
        if len(edges) > _MOST_EDGES:
            self.whole.wrong("stages", f"wait for others more than {_MOST_EDGES} times")
            return None
        try:
            return Workflow(name, tuple(stages), edges)
        except BadWorkflow as error:
            self.problems.add(listed.line_of(error.stage), error.reason)
            return None
