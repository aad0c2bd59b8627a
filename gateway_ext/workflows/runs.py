"""Runs workflows, for clients that wait and for jobs: counted, traced, within the limits."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from common.http.asgi import Header
from common.telemetry.traces import SpanKind
from gateway_ext.calls.invoke import Invoke, StreamedResponse, close_body
from gateway_ext.error_statuses import status_of
from gateway_ext.errors import GatewayError
from gateway_ext.tracing.tracer import CallTracer, TracedStep, trace_headers_in
from gateway_ext.workflows.errors import StageFailed
from gateway_ext.workflows.history import RunHistory, RunRecord, WorkflowMeters
from gateway_ext.workflows.limits import RunLimits, RunShare
from gateway_ext.workflows.plan import REQUEST, PlannedStage, WorkflowPlan
from gateway_ext.workflows.stage_calls import (
    STAGE_HEADER,
    Body,
    RunServices,
    StageCalls,
    failed_answer,
    listed_answer,
    whole_body,
)
from gateway_ext.workflows.stage_inputs import (
    CONTENT_TYPE,
    JSON_TYPE,
    StageAnswer,
    StageInput,
    WorkflowRequest,
    joined,
    stage_input,
    workflow_request,
)

_GONE = 499
_FAILURES, _SERVER_ERRORS = 400, 500


class WorkflowCalls:
    """Runs workflows of one gateway."""

    def __init__(
        self, invoke: Invoke, limits: RunLimits, history: RunHistory, meters: WorkflowMeters
    ) -> None:
        self.limits = limits
        self.history = history
        self._services = RunServices(invoke, limits, history.mean_s)
        self._meters = meters
        self._tracer: CallTracer = invoke.tracer

    @asynccontextmanager
    async def call(
        self,
        plan: WorkflowPlan,
        call_id: str,
        headers: Sequence[Header],
        query: bytes,
        body: bytes,
        share: RunShare,
    ) -> AsyncIterator[StreamedResponse]:
        """The answer of a run, also of one that failed; WorkflowsBusy if there is no room for it.

        `share` holds the body already.

        Busy if a stage that will be called would be refused now: the stages before it would be
        computed in vain. The run ends with the context.
        """
        for stage in plan.stages.values():
            if stage.must_succeed:
                self._services.invoke.check_wait(stage.function)
        parent = trace_headers_in(headers)
        with self.limits.run():
            request = workflow_request(call_id, headers, query, body)
            record = self.history.begin(plan, call_id)
            name = f"workflow {plan.id}"
            with self._tracer.step(call_id, name, parent, SpanKind.SERVER) as step:
                try:
                    calls = StageCalls(self._services, plan, share, record, step.trace)
                    run = LiveRun(plan, request, record, calls)
                    answer = await _answered(run, record, step)
                    if answer.status >= _FAILURES:
                        record.end(answer.status, step.error)
                    noted = _noted(answer.body, record, answer.status, step)
                    try:
                        yield answer._replace(body=noted)
                    finally:
                        await noted.aclose()
                        await close_body(answer.body)
                finally:
                    self._end(record, step)

    def _end(self, record: RunRecord, step: TracedStep) -> None:
        self.history.end(record, _GONE, "it was broken off")
        step.facts["http.response.status_code"] = record.status
        skipped = ", ".join(name for name, stage in record.stages.items() if stage.skipped)
        if skipped:
            step.facts["gpufaas.skipped"] = skipped
        self._meters.ended(record)


_NOTHING = 204


class LiveRun:
    """A run in progress. Cancelling the task that waits for its answer ends all of its calls."""

    def __init__(
        self, plan: WorkflowPlan, request: WorkflowRequest, record: RunRecord, calls: StageCalls
    ) -> None:
        self._plan = plan
        self._request = request
        self._record = record
        self._calls = calls
        self._answers: dict[str, StageAnswer] = {REQUEST: request.answer}

    async def answer(self) -> StreamedResponse:
        """Run all stages; the answer of a single last one is passed on while it arrives.

        StageFailed has the answer if a stage failed.
        """
        await self._calls.check(REQUEST, self._request.answer)
        last = self._plan.last
        if len(last) > 1:
            await self._run(self._plan.graph.order)
            answers = {name: self._answers[name] for name in last if name in self._answers}
            size_bytes = sum(len(answer.body) for answer in answers.values())
            body = await self._calls.computed(last[0], size_bytes, lambda: joined(answers))
            return StreamedResponse(200, [JSON_TYPE], whole_body(body))
        (name,) = last
        await self._run([stage_name for stage_name in self._plan.graph.order if stage_name != name])
        stage = self._plan.stages[name]
        if not await self._is_due(stage):
            return StreamedResponse(_NOTHING, [(STAGE_HEADER, name.encode())], whole_body(b""))
        if stage.each:
            whole = await self._calls.called_for_each(stage, await self._begun(stage))
            self._record.stage(name).ended_s = time.monotonic()
            return listed_answer(name, whole)
        response = await self._calls.called(stage, await self._begun(stage), self._calls.streamed)
        headers = [header for header in response.headers if header[0] != STAGE_HEADER]
        return StreamedResponse(
            response.status,
            [*headers, (STAGE_HEADER, name.encode())],
            self._noted(stage, response.body),
            called=stage.is_later,
        )

    async def _run(self, stages: Sequence[str]) -> None:
        """Run these stages; of several failures the first one counts, and ends the others."""
        tasks: dict[str, asyncio.Task[None]] = {}

        async def run(name: str) -> None:
            await asyncio.gather(*(tasks[before] for before in self._plan.graph.before(name)))
            await self._stage(name)

        for name in stages:  # each comes after those that it waits for
            tasks[name] = asyncio.create_task(run(name), name=f"stage {name}")
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

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
        present = {name: self._answers[name] for name in stage.sources if name in self._answers}
        due = bool(present)
        if due and stage.when is not None:
            condition = stage.when
            due = await self._calls.computed(stage.name, 0, lambda: condition.holds(present))
        if not due:
            self._record.stage(stage.name).skipped = True
        return due

    async def _begun(self, stage: PlannedStage) -> StageInput:
        self._record.stage(stage.name).began_s = time.monotonic()
        wants_handle = self._request.wants_handle and stage.name in self._plan.last

        def made() -> StageInput:
            return stage_input(stage, self._request, self._answers, wants_handle=wants_handle)

        if len(stage.sources) == 1:  # it is the body of an answer that is held
            return made()
        sources = [self._answers[name] for name in stage.sources if name in self._answers]
        size_bytes = sum(len(answer.body) for answer in sources)
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


async def _answered(run: LiveRun, record: RunRecord, step: TracedStep) -> StreamedResponse:
    try:
        return await run.answer()
    except StageFailed as failure:
        step.error = str(failure)
        return failed_answer(failure)
    except GatewayError as error:
        record.end(status_of(error), str(error))
        raise


async def _noted(
    body: AsyncGenerator[bytes, None], record: RunRecord, status: int, step: TracedStep
) -> AsyncGenerator[bytes, None]:
    """The body; its end is the end of the run."""
    try:
        async with aclosing(body) as pieces:
            async for piece in pieces:
                yield piece
    except GatewayError as error:
        step.error = str(error)
        record.end(status_of(error), str(error))
        raise
    if status >= _SERVER_ERRORS:
        step.error = step.error or f"status {status}"
    record.end(status, step.error)
