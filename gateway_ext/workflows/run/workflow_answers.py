"""Answers of workflows: a failed stage's, several stages', and bodies that are whole."""

from collections.abc import AsyncGenerator
from typing import NamedTuple, TypeAlias

from common.http.asgi import Header
from gateway_ext.calls.call_headers import DATA
from gateway_ext.errors import StageFailed
from gateway_ext.workflows.plan.stage_inputs import CONTENT_TYPE, JSON_TYPE, StageAnswer

Body: TypeAlias = AsyncGenerator[bytes, None]

STAGE_HEADER = b"x-workflow-stage"
TEXT: Header = (CONTENT_TYPE, b"text/plain; charset=utf-8")


class WorkflowAnswer(NamedTuple):
    """The answer of a workflow; the body must be read to its end, or closed.

    `refused` says that a stage was, for now, and that its function was not called; `called`, of an
    answer that may be a failed stage's, that something was computed.
    """

    status: int
    headers: list[Header]
    body: Body
    refused: bool = False
    called: bool = False


def failed_answer(failure: StageFailed) -> WorkflowAnswer:
    """The answer of a workflow of which a stage failed: the stage's own, if it has one."""
    named = (STAGE_HEADER, failure.stage.encode())
    if failure.body is None:
        kept = [header for header in failure.headers if header[0] != CONTENT_TYPE]
        body = whole_body(str(failure).encode())
        headers = [TEXT, *kept, named]
    else:
        headers, body = [*failure.headers, named], whole_body(failure.body)
    return WorkflowAnswer(failure.status, headers, body, failure.refused, failure.called)


def listed_answer(stage: str, whole: StageAnswer) -> WorkflowAnswer:
    """The answer of a last stage that was called for each element."""
    data = [(DATA, b", ".join(whole.data))] if whole.data else []
    headers = [JSON_TYPE, *data, (STAGE_HEADER, stage.encode())]
    return WorkflowAnswer(200, headers, whole_body(whole.body))


async def whole_body(body: bytes) -> Body:
    """A body that is here already."""
    if body:
        yield body
