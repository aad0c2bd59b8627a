"""How a job calls its function: a port, answered by the invocation path."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from gateway_ext.asgi import Header
from gateway_ext.jobs.bodies import Body
from gateway_ext.jobs.model import Call


@dataclass(slots=True)
class Answer:
    """What a function answers; its body comes while it is read."""

    status: int
    headers: Sequence[Header]
    body: AsyncIterator[bytes]


class Calls(Protocol):
    """Calls functions, with everything that a call from outside has: leases, limits, waking."""

    def call(self, call: Call, body: Body) -> AbstractAsyncContextManager[Answer]:
        """The answer, for as long as it is read; what goes wrong is one of `gateway_ext.errors`.

        Reading the body raises them as well, where the function breaks off.
        """
        ...
