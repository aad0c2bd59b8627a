"""Runs workflows, for clients that wait and for jobs: counted, traced, within the limits."""

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import uniform
from typing import TypeAlias, TypeVar

from common.http.asgi import Header
from common.tasks import error_of
from common.telemetry.traces import TRACEPARENT, TRACESTATE, SpanKind, TraceContext
from gateway_ext.calls.function_table import CallPart
from gateway_ext.calls.invoke import PREFIX, Invoke, StreamedResponse, close_body
from gateway_ext.calls.passed_headers import DATA, asked_wait_s
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import GatewayError
from gateway_ext.tracing.tracer import CallTracer, TracedStep, trace_headers_in
from gateway_ext.workflows.conditions import JsonPath, Unmeetable
from gateway_ext.workflows.errors import StageFailed, WorkflowsBusy
from gateway_ext.workflows.history import RunHistory, RunRecord, WorkflowMeters
from gateway_ext.workflows.limits import RunLimits, RunShare
from gateway_ext.workflows.plan import REQUEST, PlannedStage, WorkflowPlan
from gateway_ext.workflows.stage_inputs import (
    CONTENT_TYPE,
    JSON_TYPE,
    StageAnswer,
    StageInput,
    WorkflowRequest,
    each_input,
    joined,
    listed,
    stage_answer,
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
                    run = LiveRun(self._services, plan, request, share, record, step.trace)
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


Result = TypeVar("Result")
_OK, _TOO_LONG, _TOO_MANY, _GARBAGE = 200, 504, 429, 502
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 30.0
_MOST_DOUBLINGS = 10
_AT_A_TIME = 16  # calls of a stage that is called for each element
# Larger bodies are read and joined in a thread, one at a time: a decoder stops all threads.
_LARGE_BYTES = 64 << 10
# What a failed stage's answer keeps of its headers.
_OF_FAILURES = frozenset({CONTENT_TYPE, b"retry-after"})


@dataclass(frozen=True, slots=True)
class RunServices:
    """What every run uses: the path of calls, its bounds, the times of stages."""

    invoke: Invoke
    limits: RunLimits
    mean_s: Callable[[WorkflowPlan], Mapping[str, float]] = field(default=lambda _: {})
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class LiveRun:
    """A run in progress: calls its stages; every failure of them is raised as StageFailed.

    Cancelling the task that waits for its answer ends all of its calls.
    """

    def __init__(
        self,
        services: RunServices,
        plan: WorkflowPlan,
        request: WorkflowRequest,
        share: RunShare,
        record: RunRecord,
        trace: TraceContext,
    ) -> None:
        """`trace` is the trace, with the parent, of all calls."""
        self._services = services
        self._plan = plan
        self._request = request
        self._answers: dict[str, StageAnswer] = {REQUEST: request.answer}
        self._share = share
        self._record = record
        self._own_headers: list[Header] = [
            (b"x-call-id", record.call_id.encode("latin-1")),
            (TRACEPARENT.encode(), trace.header.encode()),
        ]
        if trace.state:
            self._own_headers.append((TRACESTATE.encode(), trace.state.encode("latin-1")))
        self._deadline_s = record.began_s + plan.timeout_s
        self._budgets = stage_budgets(plan, services.mean_s(plan))

    async def answer(self) -> StreamedResponse:
        """Run all stages; the answer of a single last one is passed on while it arrives.

        StageFailed has the answer if a stage failed.
        """
        await self.check(REQUEST, self._request.answer)
        last = self._plan.last
        if len(last) > 1:
            await self._run(self._plan.graph.order)
            answers = {name: self._answers[name] for name in last if name in self._answers}
            size_bytes = sum(len(answer.body) for answer in answers.values())
            body = await self.computed(last[0], size_bytes, lambda: joined(answers))
            return StreamedResponse(200, [JSON_TYPE], whole_body(body))
        (name,) = last
        await self._run([stage_name for stage_name in self._plan.graph.order if stage_name != name])
        stage = self._plan.stages[name]
        if not await self._is_due(stage):
            return StreamedResponse(_NOTHING, [(STAGE_HEADER, name.encode())], whole_body(b""))
        if stage.each:
            whole = await self.called_for_each(stage, await self._begun(stage))
            self._record.stage(name).ended_s = time.monotonic()
            return listed_answer(name, whole)
        response = await self.called(stage, await self._begun(stage), self.streamed)
        headers = [header for header in response.headers if header[0] != STAGE_HEADER]
        return StreamedResponse(
            response.status,
            [*headers, (STAGE_HEADER, name.encode())],
            response.body,
            called=stage.is_later,
        )

    async def _run(self, stages: Sequence[str]) -> None:
        """Run these stages; of several failures the first one counts, and ends the others."""
        tasks: dict[str, asyncio.Task[None]] = {}

        async def run(name: str) -> None:
            # One by one: a cancelled gather would cancel them along every path of the graph.
            for before in self._plan.graph.before(name):
                await asyncio.wait((tasks[before],))
                tasks[before].result()
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
                self._answers[name] = await self.called_for_each(stage, sent)
            else:
                self._answers[name] = await self.called(stage, sent, self.whole_answer)
        except StageFailed as failure:
            if not stage.optional:
                raise
            kinds = [value for key, value in failure.headers if key == CONTENT_TYPE]
            body = str(failure).encode() if failure.body is None else failure.body
            answer = StageAnswer(failure.status, body, kinds[0] if kinds else b"")
            await self.read(name, answer)
            self._answers[name] = answer
        finally:
            self._record.stage(name).ended_s = time.monotonic()

    async def _is_due(self, stage: PlannedStage) -> bool:
        present = {name: self._answers[name] for name in stage.sources if name in self._answers}
        due = bool(present)
        if due and stage.when is not None:
            condition = stage.when
            due = await self.computed(stage.name, 0, lambda: condition.holds(present))
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
        sent = await self.computed(stage.name, size_bytes, made)
        self.hold(stage, len(sent.body))
        return sent

    # -- calls of stages --------------------------------------------------------------------------

    async def called(
        self, stage: PlannedStage, sent: StageInput, finish: Callable[..., Awaitable[Result]]
    ) -> Result:
        """Call, and call again what failed, if it may.

        What is refused for now, as by a quota, and follows other stages is no attempt: it is called
        again while there is time, since what was computed would be lost.
        """
        record = self._record.stage(stage.name)
        attempts = pauses = 0
        while True:
            attempts += 1
            record.attempts += 1
            tries_left = stage.retries + 1 - attempts
            try:
                return await self._attempt(stage, sent, finish, final=not tries_left)
            except StageFailed as failure:
                record.status, record.why = failure.status, str(failure)
                backoff_s = stage.backoff_s
                if failure.refused and stage.is_later:
                    attempts, tries_left = attempts - 1, tries_left + 1
                    backoff_s = max(backoff_s, _LEAST_BACKOFF_S)
                asked_s = asked_wait_s(failure.headers, time.time())
                pause_s = backoff_s * 2 ** min(pauses, _MOST_DOUBLINGS) * uniform(0.5, 1.5)
                pauses += 1
                pause_s = min(max(pause_s, asked_s), _MOST_BACKOFF_S)
                hopeless = time.monotonic() + pause_s >= self._deadline_s
                if not tries_left or hopeless or not _may_pass(failure.status):
                    record.ended_s = time.monotonic()
                    failure.called = failure.called or stage.is_later
                    raise
                self._share.give_back(len(failure.body or b""))
            await asyncio.sleep(pause_s)

    async def called_for_each(self, stage: PlannedStage, sent: StageInput) -> StageAnswer:
        """Call the stage for each element of its input, some at a time; the array of the answers.

        The first failure is the stage's, and ends the other calls.
        """
        passes_handles = stage.by_handle and bool(self._plan.graph.after(stage.name))
        status = None if stage.sources == (REQUEST,) else _OK
        inputs = await self.computed(
            stage.name,
            len(sent.body),
            lambda: each_input(
                sent, status, self._services.limits.json_bytes, passes_handles=passes_handles
            ),
        )
        places = asyncio.Semaphore(_AT_A_TIME)

        async def called(item: StageInput) -> StageAnswer:
            async with places:
                return await self.called(stage, item, self.whole_answer)

        calls = [asyncio.create_task(called(item)) for item in inputs]
        try:
            results = await asyncio.gather(*calls)
            size_bytes = sum(len(answer.body) for answer in results)
            whole = await self.computed(stage.name, size_bytes, lambda: listed(results))
            await self.check(stage.name, whole)
            self.hold(stage, len(whole.body))
            return whole
        finally:
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            # The elements' answers are in the whole one, or nobody reads them.
            answers = [answer for answer in ended if isinstance(answer, StageAnswer)]
            self._share.give_back(sum(len(answer.body) for answer in answers))

    async def check(self, name: str, answer: StageAnswer) -> None:
        """Read an answer, or the request; StageFailed if later stages cannot use it."""
        await self.read(name, answer)
        await self.computed(name, 0, answer.check)

    async def read(self, name: str, answer: StageAnswer) -> None:
        """Decode what the gateway itself needs of an answer, to compare or to join it."""
        last = self._plan.last
        after = [stage for stage in self._plan.stages.values() if name in stage.sources]
        paths = {path for stage in after if stage.when for path in stage.when.paths(name)}
        is_joined = any(len(stage.sources) > 1 for stage in after)
        if paths or is_joined or (name in last and len(last) > 1):
            await self._decode(name, answer, paths)

    async def computed(self, stage: str, size_bytes: int, compute: Callable[[], Result]) -> Result:
        """Compute something of so many bytes, in a thread if they are many."""
        try:
            if size_bytes <= _LARGE_BYTES:
                return compute()
            await self._services.reading.acquire()
            work = asyncio.get_running_loop().run_in_executor(None, compute)
            work.add_done_callback(self._has_read)  # the thread goes on when its caller has left
            return await asyncio.shield(work)
        except Unmeetable as error:
            raise StageFailed(stage, error.status, str(error), headers=[TEXT_HEADER]) from error

    def _has_read(self, work: asyncio.Future[Result]) -> None:
        self._services.reading.release()
        error_of(work)  # else asyncio logs it where nobody waits any more

    def hold(self, stage: PlannedStage, size_bytes: int) -> None:
        """Take room for what was computed for a stage, or by it; StageFailed if there is none."""
        try:
            self._share.hold(size_bytes)
        except GatewayError as error:
            raise _failed(stage, error, called=True) from error

    async def _attempt(
        self,
        stage: PlannedStage,
        sent: StageInput,
        finish: Callable[..., Awaitable[Result]],
        *,
        final: bool,
    ) -> Result:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            limit = f"the workflow did not end within {self._plan.timeout_s:g} s"
            raise StageFailed(stage.name, _TOO_LONG, limit)
        within_s = left_s if stage.timeout_s is None else min(left_s, stage.timeout_s)
        part = CallPart(
            str(self._plan.id),
            stage.name,
            within_s,
            self._budget_s(stage.name),
            later=stage.is_later,
        )
        path = f"{PREFIX}{stage.function}".encode()
        headers = [*sent.headers, *self._own_headers]
        try:
            response = await self._services.invoke.direct(
                "POST", path, sent.query, headers, sent.body, part
            )
            self._record.stage(stage.name).status = response.status
            return await finish(stage, response, final=final)
        except StageFailed:
            raise
        except GatewayError as error:
            # An answer that finds no room is a failure like others: its function was called.
            raise _failed(stage, error, called=isinstance(error, WorkflowsBusy)) from error

    async def streamed(
        self, stage: PlannedStage, response: StreamedResponse, *, final: bool
    ) -> StreamedResponse:
        """The last stage's response, also a failure if no other attempt follows."""
        if response.status < _FAILURES or final or not _may_pass(response.status):
            return response
        raise await self._failure(stage, response)

    async def whole_answer(
        self, stage: PlannedStage, response: StreamedResponse, *, final: bool
    ) -> StageAnswer:
        del final
        if response.status >= _FAILURES:
            raise await self._failure(stage, response)
        body = await self._read(stage, response)
        try:
            answer = await self.computed(
                stage.name, 0, lambda: stage_answer(response.status, response.headers, body)
            )
            if stage.each:  # it will be an element of an array
                await self._decode(stage.name, answer, ())
                await self.computed(stage.name, 0, answer.check)
            else:
                await self.check(stage.name, answer)
        except BaseException:  # nobody reads it
            self._share.give_back(len(body))
            raise
        return answer

    async def _decode(self, name: str, answer: StageAnswer, paths: Collection[JsonPath]) -> None:
        most_bytes = self._services.limits.json_bytes
        await self.computed(name, len(answer.body), lambda: answer.read(paths, most_bytes))

    async def _failure(self, stage: PlannedStage, response: StreamedResponse) -> StageFailed:
        body = await self._read(stage, response)
        kept = [header for header in response.headers if header[0] in _OF_FAILURES]
        why = f"{stage.function} answered {response.status}"
        return StageFailed(stage.name, response.status, why, headers=kept, body=body)

    async def _read(self, stage: PlannedStage, response: StreamedResponse) -> bytes:
        most_bytes = self._services.limits.answer_bytes
        parts = bytearray()
        try:
            async with aclosing(response.body) as pieces:
                async for piece in pieces:
                    self._share.hold(len(piece))
                    parts += piece
                    if len(parts) > most_bytes:
                        why = f"its answer is larger than {most_bytes} bytes"
                        raise StageFailed(stage.name, _GARBAGE, why, headers=[TEXT_HEADER])
        except BaseException:
            self._share.give_back(len(parts))
            raise
        return bytes(parts)

    def _budget_s(self, name: str) -> float | None:
        """The stage's part of the time that is left until the workflow's SLO; at least 1 ms."""
        if self._plan.slo_s is None:
            return None
        left_s = self._record.began_s + self._plan.slo_s - time.monotonic()
        return max(0.001, left_s * self._budgets[name])


def _failed(stage: PlannedStage, error: GatewayError, *, called: bool) -> StageFailed:
    status = status_of(error)
    headers = [TEXT_HEADER, *headers_of(error)]
    refused = status == _TOO_MANY and not called
    return StageFailed(
        stage.name, status, str(error), headers=headers, refused=refused, called=called
    )


def _may_pass(status: int) -> bool:
    return status >= _SERVER_ERRORS or status == _TOO_MANY


def stage_budgets(plan: WorkflowPlan, known_s: Mapping[str, float]) -> Mapping[str, float]:
    """Of each stage, its part of the longest path that begins with it.

    `known_s` are times of stages; one without a time counts as an average one.
    """
    average_s = sum(known_s.values()) / len(known_s) if known_s else 1.0
    weights = {name: max(known_s.get(name, average_s), 1e-6) for name in plan.stages}
    rest = plan.graph.longest(weights)
    return {name: weights[name] / rest[name] for name in plan.stages}


Body: TypeAlias = AsyncGenerator[bytes, None]

STAGE_HEADER = b"x-workflow-stage"
TEXT_HEADER: Header = (CONTENT_TYPE, b"text/plain; charset=utf-8")


def failed_answer(failure: StageFailed) -> StreamedResponse:
    """The answer of a workflow of which a stage failed: the stage's own, if it has one."""
    named = (STAGE_HEADER, failure.stage.encode())
    if failure.body is None:
        kept = [header for header in failure.headers if header[0] != CONTENT_TYPE]
        body = whole_body(str(failure).encode())
        headers = [TEXT_HEADER, *kept, named]
    else:
        headers, body = [*failure.headers, named], whole_body(failure.body)
    return StreamedResponse(failure.status, headers, body, failure.refused, failure.called)


def listed_answer(stage: str, whole: StageAnswer) -> StreamedResponse:
    """The answer of a last stage that was called for each element."""
    data = [(DATA, b", ".join(whole.data))] if whole.data else []
    headers = [JSON_TYPE, *data, (STAGE_HEADER, stage.encode())]
    return StreamedResponse(200, headers, whole_body(whole.body))


async def whole_body(body: bytes) -> Body:
    if body:
        yield body


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
