"""Calls of the stages of one run: attempts, the time that they may take, and their answers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from random import uniform
from typing import TypeAlias, TypeVar

from common.http.asgi import Header
from common.tasks import error_of
from common.telemetry.traces import TRACEPARENT, TRACESTATE, TraceContext
from gateway_ext import error_statuses
from gateway_ext.calls.function_table import CallPart
from gateway_ext.calls.invoke import PREFIX, Invoke, StreamedResponse
from gateway_ext.calls.passed_headers import DATA, asked_wait_s
from gateway_ext.errors import GatewayError
from gateway_ext.workflows.conditions import JsonPath, Unmeetable
from gateway_ext.workflows.errors import StageFailed, WorkflowsBusy
from gateway_ext.workflows.history import RunRecord
from gateway_ext.workflows.limits import RunLimits, RunShare
from gateway_ext.workflows.plan import REQUEST, PlannedStage, WorkflowPlan
from gateway_ext.workflows.stage_inputs import (
    CONTENT_TYPE,
    JSON_TYPE,
    StageAnswer,
    StageInput,
    each_input,
    listed,
    stage_answer,
)

Result = TypeVar("Result")

_FAILURES, _SERVER_ERRORS = 400, 500
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


class StageCalls:
    """Calls the stages of one run; every failure is raised as StageFailed."""

    def __init__(
        self,
        services: RunServices,
        plan: WorkflowPlan,
        share: RunShare,
        record: RunRecord,
        trace: TraceContext,
    ) -> None:
        """`trace` is the trace, with the parent, of all calls."""
        self._services = services
        self._plan = plan
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
    status = error_statuses.status_of(error)
    headers = [TEXT_HEADER, *error_statuses.headers_of(error)]
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
