"""`context.put`, `event.data` and handles instead of bodies: what handlers and callers see."""

import json
from collections.abc import Callable
from functools import partial

import pytest

from gateway_ext.runtime.handler_values import (
    HandlerContext,
    HandlerData,
    HandlerEvent,
    Headers,
    NoPassedData,
    answer_of,
    is_whole,
)
from tests.kit.processes.runtime_process import runtime

HANDLE = "node." + 32 * "h"


class Kept(HandlerData):
    """Data that a test keeps in a dictionary."""

    def __init__(self) -> None:
        super().__init__(gpu=True)
        self.values: dict[str, object] = {}
        self.wished: list[str] = []

    def put(self, value: object, lifetime_s: float | None = None, *, wished: bool = False) -> str:
        del lifetime_s
        handle = f"node.{len(self.values):032}"
        self.wished += [handle] if wished else []
        self.values[handle] = value
        return handle

    def get(self, handle: str) -> object:
        return self.values[handle]

    def drop(self, handle: str) -> None:
        self.values.pop(handle, None)

    @property
    def shim(self) -> "Kept":
        """It keeps them itself."""
        return self

    def wanted(self, headers: Headers) -> bool:
        del headers
        return True


def event(kept: HandlerData, *data: str) -> HandlerEvent:
    headers = Headers([("X-Gpu-Data", each) for each in data])
    return HandlerEvent("POST", "/", headers, b"", kept)


def test_context_puts_gets_and_drops() -> None:
    kept = Kept()
    context = HandlerContext("here", kept)
    handle = context.put([1, 2])
    assert context.get(handle) == [1, 2]
    context.drop(handle)
    assert kept.values == {}


def test_data_of_an_event_is_what_its_header_names() -> None:
    kept = Kept()
    one, other = kept.put("one"), kept.put("other")
    assert event(kept).data is None
    assert event(kept, "handle").data is None
    assert event(kept, one).data == "one"
    assert event(kept, f"handle, {other}").data == "other"
    assert event(kept, f"{one},{other}").data == ["one", "other"]
    assert event(kept, one, other).data == ["one", "other"]


def test_everything_says_what_to_do_in_a_function_without_a_gpu() -> None:
    context = HandlerContext("here")
    uses: list[Callable[[], object]] = [
        lambda: context.put(b"x"),
        lambda: context.get(HANDLE),
        partial(context.drop, HANDLE),
        lambda: event(HandlerData(), HANDLE).data,
    ]
    for use in uses:
        with pytest.raises(NoPassedData, match="this function has no GPU"):
            use()
    assert HandlerData().wanted(Headers([("X-Gpu-Data", "handle")])) is False


@pytest.mark.parametrize(
    ("items", "wanted"),
    [([], False), (["handle"], True), ([HANDLE], False), ([f"{HANDLE} , handle"], True)],
)
def test_caller_wants_a_handle_when_it_says_so(items: list[str], wanted: bool) -> None:  # noqa: FBT001 - a row
    headers = Headers([("X-Gpu-Data", item) for item in items])
    assert HandlerData(gpu=True).wanted(headers) is wanted


def test_result_is_exchanged_for_its_handle() -> None:
    kept = Kept()
    answer = answer_of(kept.exchanged([1, 2]))
    (handle,) = kept.values
    assert kept.values[handle] == [1, 2]
    assert answer.status == 200
    assert kept.wished == [handle]
    assert json.loads(answer.body) == {"data": handle}
    assert dict(answer.headers) == {"X-Gpu-Data": handle, "Content-Type": "application/json"}


@pytest.mark.parametrize(
    "headers",
    [{"X-Mine": "1", "content-type": "image/png"}, [("X-Mine", "1"), ("Content-Type", "x/y")]],
)
def test_body_is_exchanged_and_its_own_headers_stay(headers: object) -> None:
    kept = Kept()
    answer = answer_of(kept.exchanged({"statusCode": 201, "headers": headers, "body": b"bytes"}))
    (handle,) = kept.values
    assert kept.values[handle] == b"bytes"
    assert answer.status == 201
    names = dict(answer.headers)
    assert names == {"X-Mine": "1", "X-Gpu-Data": handle, "Content-Type": "application/json"}


def test_refusal_is_not_exchanged() -> None:
    kept = Kept()
    refusal = {"statusCode": 422, "body": "no"}
    assert kept.exchanged(refusal) is refusal
    assert kept.values == {}


def test_streams_and_awaitables_are_no_whole_results() -> None:
    async def later() -> None:
        """Nothing."""

    coroutine = later()
    assert not is_whole(iter([]))
    assert not is_whole(coroutine)
    coroutine.close()
    assert all(map(is_whole, ("text", b"", [1], {}, None, object())))


def test_handler_without_a_gpu_is_told_so_and_other_calls_are_served() -> None:
    handler = """
def handle(event, context):
    if event.path == "/put":
        context.put(b"x")
    return "fine"
"""
    with runtime(handler) as function:
        refused = function.call("/put")
        assert refused.status == 500
        assert b"NoPassedData" in refused.body
        assert function.call(headers={"X-Gpu-Data": f"handle,{HANDLE}"}).body == b"fine"
