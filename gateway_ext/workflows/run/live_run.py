"""One run of a workflow: every stage as soon as its inputs are there, until one fails."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from random import uniform
from typing import NamedTuple, TypeAlias, TypeVar

from common.http.asgi import Header
from common.telemetry.traces import TRACEPARENT, TRACESTATE, TraceContext
from gateway_ext import error_statuses
from gateway_ext.calls.call_limits import CallPart
from gateway_ext.calls.invoke import PREFIX, Invoke, StreamedResponse
from gateway_ext.errors import GatewayError, StageFailed
from gateway_ext.workflows.plan.conditions import Unmeetable
from gateway_ext.workflows.plan.stage_inputs import (
    CONTENT_TYPE,
    JSON_TYPE,
    StageAnswer,
    StageInput,
    WorkflowRequest,
    joined,
    stage_answer,
    stage_input,
)
from gateway_ext.workflows.plan.workflow_values import REQUEST, PlannedStage, WorkflowPlan
from gateway_ext.workflows.run.run_history import RunRecord
from gateway_ext.workflows.run.run_limits import RunShare

Result = TypeVar("Result")
Body: TypeAlias = AsyncGenerator[bytes, None]

STAGE_HEADER = b"x-workflow-stage"
_FAILURES, _SERVER_ERRORS = 400, 500
_TOO_LONG, _TOO_MANY, _GARBAGE, _NOTHING = 504, 429, 502, 204
_MOST_BACKOFF_S = 30.0
# Larger bodies are parsed and joined in a thread.
_LARGE_BYTES = 256 << 10
_TEXT: Header = (CONTENT_TYPE, b"text/plain; charset=utf-8")
# What a failed stage's answer keeps of its headers.
_OF_FAILURES = frozenset({CONTENT_TYPE, b"retry-after"})


class WorkflowAnswer(NamedTuple):
    """The answer of a workflow; the body must be read to its end, or closed."""

    status: int
    headers: list[Header]
    body: Body


@dataclass(frozen=True, slots=True)
class RunServices:
    """What every run uses: the path of calls, and the bound of a stage's answer."""

    invoke: Invoke
    answer_bytes: int
    weights: Callable[[WorkflowPlan], Mapping[str, float]] = field(default=lambda _: {})


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
        self._services = services
        self._plan = plan
        self._request = request
        self._share = share
        self._record = record
        self._own_headers = [
            (b"x-call-id", request.call_id.encode("latin-1")),
            (TRACEPARENT.encode(), trace.header.encode()),
        ]
        if trace.state:
            self._own_headers.append((TRACESTATE.encode(), trace.state.encode("latin-1")))
        self._deadline_s = record.began_s + plan.timeout_s
        self._answers: dict[str, StageAnswer] = {REQUEST: request.answer}
        self._budgets = _budgets(plan, services.weights(plan))

    async def answer(self) -> WorkflowAnswer:
        """Run all stages; the answer of a single last one is passed on while it arrives.

        StageFailed has the answer if a stage failed.
        """
        last = self._plan.last
        if len(last) > 1:
            await self._run(self._plan.graph.order)
            found = {name: self._answers[name] for name in last if name in self._answers}
            body = await self._computed(last[0], found, lambda: joined(found))
            return WorkflowAnswer(200, [JSON_TYPE], _whole(body))
        (name,) = last
        await self._run([each for each in self._plan.graph.order if each != name])
        stage = self._plan.stages[name]
        if not await self._is_due(stage):
            return WorkflowAnswer(_NOTHING, [(STAGE_HEADER, name.encode())], _whole(b""))
        response = await self._called(stage, self._streamed)
        headers = [header for header in response.headers if header[0] != STAGE_HEADER]
        return WorkflowAnswer(
            response.status,
            [*headers, (STAGE_HEADER, name.encode())],
            self._noted(stage, response.body),
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
            self._answers[name] = await self._called(stage, self._whole_answer)
        except StageFailed as failure:
            if not stage.optional:
                raise
            kinds = [value for key, value in failure.headers if key == CONTENT_TYPE]
            body = str(failure).encode() if failure.body is None else failure.body
            self._answers[name] = StageAnswer(failure.status, body, kinds[0] if kinds else b"")
        finally:
            self._record.stage(name).ended_s = time.monotonic()

    async def _is_due(self, stage: PlannedStage) -> bool:
        """Whether the stage runs: a source was not skipped, and its condition is met."""
        present = {name: self._answers[name] for name in stage.sources if name in self._answers}
        due = bool(present)
        if due and stage.when is not None:
            due = await self._computed(stage.name, present, lambda: _holds(stage, present))
        if not due:
            self._record.stage(stage.name).skipped = True
        return due

    async def _called(
        self, stage: PlannedStage, finish: Callable[..., Awaitable[Result]]
    ) -> Result:
        """What `finish` makes of the stage's answer; calls again what failed, if it may."""
        record = self._record.stage(stage.name)
        record.began_s = time.monotonic()
        sent = await self._input(stage)
        while True:
            record.attempts += 1
            tries_left = stage.retries + 1 - record.attempts
            try:
                return await self._attempt(stage, sent, finish, final=not tries_left)
            except StageFailed as failure:
                record.status, record.why = failure.status, str(failure)
                pause_s = stage.backoff_s * 2 ** (record.attempts - 1) * uniform(0.5, 1.5)
                pause_s = min(max(pause_s, _asked_s(failure)), _MOST_BACKOFF_S)
                hopeless = time.monotonic() + pause_s >= self._deadline_s
                if not tries_left or hopeless or not _may_pass(failure.status):
                    record.ended_s = time.monotonic()
                    raise
            await asyncio.sleep(pause_s)

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
        part = CallPart(str(self._plan.id), stage.name, within_s, self._budget_s(stage.name))
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
            status = error_statuses.status_of(error)
            raise StageFailed(
                stage.name,
                status,
                str(error),
                headers=[_TEXT, *error_statuses.headers_of(error)],
            ) from error

    async def _streamed(
        self, stage: PlannedStage, response: StreamedResponse, *, final: bool
    ) -> StreamedResponse:
        """The last stage's response, also a failure if no other attempt follows."""
        if response.status < _FAILURES or final or not _may_pass(response.status):
            return response
        raise await self._failure(stage, response)

    async def _whole_answer(
        self, stage: PlannedStage, response: StreamedResponse, *, final: bool
    ) -> StageAnswer:
        del final
        if response.status >= _FAILURES:
            raise await self._failure(stage, response)
        body = await self._read(stage, response)
        try:
            found = stage_answer(response.status, response.headers, body)
        except Unmeetable as error:
            raise StageFailed(stage.name, _GARBAGE, str(error), headers=[_TEXT]) from error
        if found.is_json and self._is_read(stage.name):
            await self._computed(stage.name, {stage.name: found}, found.json)
        return found

    async def _failure(self, stage: PlannedStage, response: StreamedResponse) -> StageFailed:
        body = await self._read(stage, response)
        kept = [header for header in response.headers if header[0] in _OF_FAILURES]
        why = f"{stage.function} answered {response.status}"
        return StageFailed(stage.name, response.status, why, headers=kept, body=body)

    async def _read(self, stage: PlannedStage, response: StreamedResponse) -> bytes:
        most_bytes = self._services.answer_bytes
        parts = bytearray()
        async with aclosing(response.body) as pieces:
            async for piece in pieces:
                self._share.hold(len(piece))
                parts += piece
                if len(parts) > most_bytes:
                    why = f"its answer is larger than {most_bytes} bytes"
                    raise StageFailed(stage.name, _GARBAGE, why, headers=[_TEXT])
        return bytes(parts)

    async def _input(self, stage: PlannedStage) -> StageInput:
        wants_handle = self._request.wants_handle and stage.name in self._plan.last

        def made() -> StageInput:
            return stage_input(stage, self._request, self._answers, wants_handle=wants_handle)

        sources = {name: self._answers[name] for name in stage.sources if name in self._answers}
        return await self._computed(stage.name, sources, made)

    async def _computed(
        self, stage: str, read: Mapping[str, StageAnswer], compute: Callable[[], Result]
    ) -> Result:
        """Compute something of these answers, in a thread if they are large."""
        try:
            if sum(len(each.body) for each in read.values()) > _LARGE_BYTES:
                return await asyncio.to_thread(compute)
            return compute()
        except Unmeetable as error:
            raise StageFailed(stage, _GARBAGE, str(error), headers=[_TEXT]) from error

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

    def _is_read(self, name: str) -> bool:
        """Whether the gateway itself reads the stage's answer, to join it or for a condition."""
        after = [self._plan.stages[each] for each in self._plan.graph.after(name)]
        return not after or any(
            len(each.sources) > 1 or (each.when is not None and name in each.when.sources)
            for each in after
        )

    def _budget_s(self, name: str) -> float | None:
        """The stage's part of the time that is left until the workflow's SLO; at least 1 ms."""
        if self._plan.slo_s is None:
            return None
        left_s = self._record.began_s + self._plan.slo_s - time.monotonic()
        return max(0.001, left_s * self._budgets[name])


def failed_answer(failure: StageFailed) -> WorkflowAnswer:
    """The answer of a workflow of which a stage failed: the stage's own, if it has one."""
    named = (STAGE_HEADER, failure.stage.encode())
    if failure.body is None:
        kept = [header for header in failure.headers if header[0] != CONTENT_TYPE]
        return WorkflowAnswer(failure.status, [_TEXT, *kept, named], _whole(str(failure).encode()))
    return WorkflowAnswer(failure.status, [*failure.headers, named], _whole(failure.body))


def _budgets(plan: WorkflowPlan, known_s: Mapping[str, float]) -> Mapping[str, float]:
    """Of each stage, its part of the longest path that begins with it.

    `known_s` are times of stages; one without a time counts as an average one.
    """
    average_s = sum(known_s.values()) / len(known_s) if known_s else 1.0
    weights = {name: max(known_s.get(name, average_s), 1e-6) for name in plan.stages}
    rest = plan.graph.longest(weights)
    return {name: weights[name] / rest[name] for name in plan.stages}


def _holds(stage: PlannedStage, answers: Mapping[str, StageAnswer]) -> bool:
    assert stage.when is not None  # the caller looked
    return stage.when.holds(answers)


def _may_pass(status: int) -> bool:
    """Whether another attempt may succeed."""
    return status >= _SERVER_ERRORS or status == _TOO_MANY


def _asked_s(failure: StageFailed) -> float:
    """The seconds of a Retry-After; 0 without one."""
    found = next((value for name, value in failure.headers if name == b"retry-after"), b"")
    return float(found) if found.isdigit() and len(found) <= 6 else 0.0  # noqa: PLR2004


async def _whole(body: bytes) -> Body:
    if body:
        yield body
