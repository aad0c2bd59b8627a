"""The port through which a job calls its function."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from common.http.asgi import Header
from gateway_ext.jobs.queue.job_bodies import StoredBody
from gateway_ext.jobs.queue.job_values import AsyncCall


@dataclass(slots=True)
class FunctionAnswer:
    """The answer of a function; its body arrives while it is read.

    A workflow's may be that a stage was `refused` by the gateway or the scheduler for now. With
    `called` it is an attempt, though it ended with 429: something was computed.
    """

    status: int
    headers: Sequence[Header]
    body: AsyncIterator[bytes]
    refused: bool = False
    called: bool = False


class FunctionCalls(Protocol):
    """Calls functions with leases, limits and waking, as a call from a client has them."""

    def call(
        self, call: AsyncCall, body: StoredBody
    ) -> AbstractAsyncContextManager[FunctionAnswer]:
        """The function's answer, while the context lasts; errors are `gateway_ext.errors`.

        Reading the body raises them too, if the function breaks off.
        """
        ...
