"""Calls of jobs take the same path as calls from clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway_ext.calls.invoke import PREFIX, Invoke, Streamed, close_body
from gateway_ext.jobs.execution.function_calls import FunctionAnswer
from gateway_ext.jobs.queue.job_bodies import StoredBody, whole
from gateway_ext.jobs.queue.job_values import AsyncCall

# A body in memory can be sent to another instance if the first one breaks off.
_HELD_BYTES = 1 << 20


class InvokeCalls:
    """See `FunctionCalls`."""

    def __init__(self, invoke: Invoke) -> None:
        self._invoke = invoke

    @asynccontextmanager
    async def call(self, call: AsyncCall, body: StoredBody) -> AsyncIterator[FunctionAnswer]:
        """The function's answer, while the context lasts."""
        path = PREFIX.encode() + str(call.function).encode() + call.path
        headers = [*call.headers, (b"x-call-id", call.id.encode("latin-1"))]
        small = body.size_bytes <= _HELD_BYTES
        content: bytes | Streamed = (
            await whole(body) if small else Streamed(body.size_bytes, body.pieces())
        )
        answer = await self._invoke.direct(call.method, path, call.query, headers, content)
        try:
            yield FunctionAnswer(answer.status, answer.headers, answer.body)
        finally:
            await close_body(answer.body)
