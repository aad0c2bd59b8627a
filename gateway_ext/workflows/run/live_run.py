"""One run of a workflow: every stage as soon as its inputs are there, until one fails."""

import asyncio
import time
from contextlib import aclosing

from common.telemetry.traces import TraceContext
from gateway_ext.errors import GatewayError, StageFailed
from gateway_ext.workflows.plan.stage_inputs import (
    CONTENT_TYPE,
    JSON_TYPE,
    StageAnswer,
    StageInput,
    WorkflowRequest,
    joined,
    stage_input,
)
from gateway_ext.workflows.plan.workflow_values import REQUEST, PlannedStage, WorkflowPlan
from gateway_ext.workflows.run.run_history import RunRecord
from gateway_ext.workflows.run.run_limits import RunShare
from gateway_ext.workflows.run.stage_calls import RunServices, StageCalls
from gateway_ext.workflows.run.workflow_answers import (
    STAGE_HEADER,
    Body,
    WorkflowAnswer,
    listed_answer,
    whole_body,
)

_NOTHING = 204


class LiveRun:
    """A run in progress. Cancelling the task that waits for its answer ends all of its calls."""

    def __init__(
        self,
        services: RunServices,
        plan: WorkflowPlan,
        request: WorkflowRequest,
        trace: TraceContext,
        share: RunShare,
        record: RunRecord,
    ) -> None:
        """`trace` is the trace, with the parent, of all calls of the stages."""
        self._plan = plan
        self._request = request
        self._share = share
        self._record = record
        self._calls = StageCalls(services, plan, share, record, trace)
        self._answers: dict[str, StageAnswer] = {REQUEST: request.answer}

    async def answer(self) -> WorkflowAnswer:
        """Run all stages; the answer of a single last one is passed on while it arrives.

        StageFailed has the answer if a stage failed.
        """
        await self._calls.check(REQUEST, self._request.answer)
        last = self._plan.last
        if len(last) > 1:
            await self._run(self._plan.graph.order)
            found = {name: self._answers[name] for name in last if name in self._answers}
            size_bytes = sum(len(each.body) for each in found.values())
            body = await self._calls.computed(last[0], size_bytes, lambda: joined(found))
            return WorkflowAnswer(200, [JSON_TYPE], whole_body(body))
        (name,) = last
        await self._run([each for each in self._plan.graph.order if each != name])
        stage = self._plan.stages[name]
        if not await self._is_due(stage):
            return WorkflowAnswer(_NOTHING, [(STAGE_HEADER, name.encode())], whole_body(b""))
        if stage.each:
            whole = await self._calls.called_for_each(stage, await self._begun(stage))
            self._record.stage(name).ended_s = time.monotonic()
            return listed_answer(name, whole)
        response = await self._calls.called(stage, await self._begun(stage), self._calls.streamed)
        headers = [header for header in response.headers if header[0] != STAGE_HEADER]
        return WorkflowAnswer(
            response.status,
            [*headers, (STAGE_HEADER, name.encode())],
            self._noted(stage, response.body),
            called=stage.is_later,
        )

    async def _run(self, stages: list[str] | tuple[str, ...]) -> None:
        """Run these stages; of several failures the first one counts, and ends the others."""
        graph = self._plan.graph
        waits = {name: set(graph.before(name)) for name in stages}
        running: dict[asyncio.Task[None], str] = {}

        def start_ready() -> None:
            for name in [name for name, before in waits.items() if not before]:
                del waits[name]
                running[asyncio.create_task(self._stage(name), name=f"stage {name}")] = name

        start_ready()
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    name = running.pop(task)
                    task.result()
                    for before in waits.values():
                        before.discard(name)
                start_ready()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _stage(self, name: str) -> None:
        stage = self._plan.stages[name]
        if not await self._is_due(stage):
            return
        try:
            sent = await self._begun(stage)
            if stage.each:
                self._answers[name] = await self._calls.called_for_each(stage, sent)
            else:
                self._answers[name] = await self._calls.called(
                    stage, sent, self._calls.whole_answer
                )
        except StageFailed as failure:
            if not stage.optional:
                raise
            kinds = [value for key, value in failure.headers if key == CONTENT_TYPE]
            body = str(failure).encode() if failure.body is None else failure.body
            answer = StageAnswer(failure.status, body, kinds[0] if kinds else b"")
            await self._calls.read(name, answer)
            self._answers[name] = answer
        finally:
            self._record.stage(name).ended_s = time.monotonic()

    async def _is_due(self, stage: PlannedStage) -> bool:
        """Whether the stage runs: a source was not skipped, and its condition is met."""
        present = {name: self._answers[name] for name in stage.sources if name in self._answers}
        due = bool(present)
        if due and stage.when is not None:
            condition = stage.when
            due = await self._calls.computed(stage.name, 0, lambda: condition.holds(present))
        if not due:
            self._record.stage(stage.name).skipped = True
        return due

    async def _begun(self, stage: PlannedStage) -> StageInput:
        """The input of a stage that begins now."""
        self._record.stage(stage.name).began_s = time.monotonic()
        wants_handle = self._request.wants_handle and stage.name in self._plan.last

        def made() -> StageInput:
            return stage_input(stage, self._request, self._answers, wants_handle=wants_handle)

        if len(stage.sources) == 1:  # it is the body of an answer that is held
            return made()
        sources = [self._answers[name] for name in stage.sources if name in self._answers]
        size_bytes = sum(len(each.body) for each in sources)
        sent = await self._calls.computed(stage.name, size_bytes, made)
        self._calls.hold(stage, len(sent.body))
        return sent

    async def _noted(self, stage: PlannedStage, body: Body) -> Body:
        """The body of the last stage; notes the stage's end."""
        record = self._record.stage(stage.name)
        try:
            async with aclosing(body) as pieces:
                async for piece in pieces:
                    yield piece
        except GatewayError as error:
            record.why = str(error)
            raise
        finally:
            record.ended_s = time.monotonic()
