"""Runs workflows, for clients that wait and for jobs: counted, traced, within the limits."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from common.http.asgi import Header
from common.telemetry.traces import SpanKind
from gateway_ext.calls.invoke import Invoke, close_body
from gateway_ext.error_statuses import status_of
from gateway_ext.errors import GatewayError, StageFailed
from gateway_ext.tracing.call_tracer import CallTracer, TracedStep, trace_headers_in
from gateway_ext.workflows.plan.stage_inputs import workflow_request
from gateway_ext.workflows.plan.workflow_values import WorkflowPlan
from gateway_ext.workflows.run.live_run import LiveRun
from gateway_ext.workflows.run.run_history import RunHistory, RunRecord
from gateway_ext.workflows.run.run_limits import RunLimits, RunShare
from gateway_ext.workflows.run.stage_calls import RunServices
from gateway_ext.workflows.run.workflow_answers import WorkflowAnswer, failed_answer
from gateway_ext.workflows.run.workflow_meters import WorkflowMeters

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
    ) -> AsyncIterator[WorkflowAnswer]:
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
                    run = LiveRun(self._services, plan, request, step.trace, share, record)
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
        skipped = ", ".join(name for name, one in record.stages.items() if one.skipped)
        if skipped:
            step.facts["gpufaas.skipped"] = skipped
        self._meters.ended(record)


async def _answered(run: LiveRun, record: RunRecord, step: TracedStep) -> WorkflowAnswer:
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
