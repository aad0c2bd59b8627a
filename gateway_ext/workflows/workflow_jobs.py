"""Workflows as the targets of jobs: /async-workflow/NAME, by the queue that functions' calls have.

A job's target is a function's id. That of a workflow has a name that no function can have.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from gateway_ext.errors import TooLarge
from gateway_ext.jobs.execution.function_calls import FunctionAnswer, FunctionCalls
from gateway_ext.jobs.queue.job_bodies import StoredBody, whole
from gateway_ext.jobs.queue.job_values import AsyncCall
from gateway_ext.model import FunctionId
from gateway_ext.workflows.plan.workflow_values import WorkflowId
from gateway_ext.workflows.run.workflow_calls import WorkflowCalls
from gateway_ext.workflows.workflow_table import Workflows

_MARK = "workflow:"


class WorkflowTargets:
    """Finds workflows as targets of jobs."""

    def __init__(self, workflows: Workflows) -> None:
        self._workflows = workflows

    def by_path(self, name: bytes) -> FunctionId | None:
        """What stands in jobs for the workflow that a path names."""
        plan = self._workflows.by_path(name)
        if plan is None:
            return None
        return FunctionId(plan.id.namespace, _MARK + plan.id.name)


class JobTargetCalls:
    """See `FunctionCalls`: runs the workflow that a job names, or calls its function."""

    def __init__(
        self, functions: FunctionCalls, workflows: Workflows, calls: WorkflowCalls
    ) -> None:
        self._functions = functions
        self._workflows = workflows
        self._calls = calls

    def call(
        self, call: AsyncCall, body: StoredBody
    ) -> AbstractAsyncContextManager[FunctionAnswer]:
        """The answer, while the context lasts."""
        if call.function.name.startswith(_MARK):
            return self._run(call, body)
        return self._functions.call(call, body)

    @asynccontextmanager
    async def _run(self, call: AsyncCall, body: StoredBody) -> AsyncIterator[FunctionAnswer]:
        namespace, name = call.function
        plan = self._workflows.by_id(WorkflowId(namespace, name.removeprefix(_MARK)))
        most_bytes = self._calls.limits.answer_bytes
        if body.size_bytes > most_bytes:
            raise TooLarge(most_bytes)
        with self._calls.limits.share() as share:
            share.hold(body.size_bytes)
            content = await whole(body)
            running = self._calls.call(plan, call.id, call.headers, call.query, content, share)
            async with running as answer:
                yield FunctionAnswer(
                    *(answer.status, answer.headers, answer.body, answer.refused, answer.called)
                )
