"""Where features plug into a gateway: the calls of jobs, and what gateways share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from gateway_ext.calls.invoke import Invoke, StreamedResponse
from gateway_ext.errors import BadRequest, Unknown
from gateway_ext.jobs.shared import SharedStore, shared_store
from gateway_ext.jobs.values import AsyncCall, MemoryBody, StoredBody
from gateway_ext.jobs.worker import TargetCalls
from gateway_ext.model import FunctionId
from gateway_ext.settings import GatewaySettings

SHARED = GatewaySettings(queue="nats://somewhere:4222")


class Others:
    """Calls what is no function."""

    def __init__(self) -> None:
        self.called: list[str] = []

    @asynccontextmanager
    async def call(self, call: AsyncCall, body: StoredBody) -> AsyncIterator[StreamedResponse]:
        del body
        self.called.append(call.function.name)
        yield cast(StreamedResponse, None)


def a_call(name: str) -> AsyncCall:
    return AsyncCall("c", FunctionId("team", name), "POST", b"/", b"", (), 0.0)


async def test_job_of_another_kind_is_called_by_its_feature() -> None:
    others = Others()
    calls = TargetCalls(cast(Invoke, None), {"other": others})
    async with calls.call(a_call("other:thing"), MemoryBody(b"")):
        assert others.called == ["other:thing"]


async def test_job_of_a_feature_that_has_left_is_unknown() -> None:
    with pytest.raises(Unknown, match="calls no other"):
        TargetCalls(cast(Invoke, None), {}).call(a_call("other:thing"), MemoryBody(b""))


def test_shared_queue_needs_a_store() -> None:
    store = cast(SharedStore, object())
    assert shared_store(GatewaySettings(), [lambda _: store]) is None
    assert shared_store(SHARED, [lambda _: store]) is store
    with pytest.raises(BadRequest, match="sqlite is expected"):
        shared_store(SHARED, ())
