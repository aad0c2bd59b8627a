"""Jobs call functions the way that everybody's calls go."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

from gateway_ext.errors import GatewayError
from gateway_ext.invoke import PREFIX, Invoke, Streamed
from gateway_ext.jobs.bodies import Body, whole
from gateway_ext.jobs.calls import Answer
from gateway_ext.jobs.model import Call

# What is held whole can be sent to another instance where the first one breaks off.
_HELD_BYTES = 1 << 20


class ThroughInvoke:
    """See `Calls`."""

    def __init__(self, invoke: Invoke) -> None:
        self._invoke = invoke

    @asynccontextmanager
    async def call(self, call: Call, body: Body) -> AsyncIterator[Answer]:
        """The answer, for as long as it is read."""
        path = PREFIX.encode() + str(call.function).encode() + call.path
        said = [*call.headers, (b"x-call-id", call.id.encode("latin-1"))]
        small = body.size_bytes <= _HELD_BYTES
        content: bytes | Streamed = (
            await whole(body) if small else Streamed(body.size_bytes, body.pieces())
        )
        answer = await self._invoke.direct(call.method, path, call.query, said, content)
        try:
            yield Answer(answer.status, answer.headers, answer.body)
        finally:
            await _close(answer.body)


async def _close(body: AsyncIterator[bytes]) -> None:
    """Let go of the call, read or not: a generator that never began would not clean up."""
    assert isinstance(body, AsyncGenerator)  # what `direct` makes
    with suppress(GatewayError):  # whatever else it had to say, nobody wants it
        await anext(body, b"")
    await body.aclose()
