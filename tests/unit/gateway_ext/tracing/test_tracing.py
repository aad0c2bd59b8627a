"""Traces of calls: headers to a function, its report, and what is remembered."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from common.telemetry.traces import Span, SpanKind, TraceContext
from gateway_ext.tracing.tracer import CallTracer, carrying, trace_headers_in
from gpufaas.log_format import JsonLines
from tests.kit.fakes.fake_function import a_function, says, writes
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway
from tests.kit.worlds.gateway_world import NOBODY, gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAID = f"00-{TRACE}-{CALLER}-01"


class Kept:
    """A sink that makes spans at once."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, make: Callable[[], Iterable[Span]]) -> None:
        self.spans += make()

    def counts(self) -> Mapping[str, int]:
        return {"sent": len(self.spans)}


def by_name(spans: Iterable[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


async def called(gateway: Gateway, *headers: str, path: str = "/function/echo") -> list[Span]:
    content = await gateway.call(path, headers=headers)
    call_id = content.header("x-call-id")
    assert call_id is not None
    return gateway.invoke.tracer.spans(call_id)


# -- headers to a function ------------------------------------------------------------------------


async def test_function_gets_the_trace_of_its_caller_below_a_span_of_ours() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        spans = by_name(await called(gateway, f"traceparent: {SAID}", "tracestate: a=1"))
        (got,) = fake.got
        assert got.header("traceparent") == f"00-{TRACE}-{spans['function'].span_id}-01"
        assert got.header("tracestate") == "a=1"
        assert spans["call echo.openfaas-fn"].parent_id == CALLER
        assert {span.trace_id for span in spans.values()} == {TRACE}


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("traceparent: 00-nonsense-01", "tracestate: a=1"),
        (f"traceparent: {SAID}", f"traceparent: {SAID}"),
    ],
)
async def test_function_gets_a_new_trace_without_a_valid_one(headers: tuple[str, ...]) -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        gateway.deploy(a_deployment(), fake)
        await gateway.call(headers=headers)
        (got,) = fake.got
        version, trace_id, span_id, flags = str(got.header("traceparent")).split("-")
        assert (version, flags) == ("00", "00")  # without a collector nothing is sampled
        assert trace_id != TRACE
        assert int(trace_id, 16)
        assert int(span_id, 16)
        assert got.header("tracestate") is None


async def test_caller_does_not_get_the_functions_report() -> None:
    header = "X-Gpu-Trace: 1 h;1;5;q=0\r\nTrailer: X-Gpu-Trace\r\n"
    async with a_gateway() as gateway, a_function(says(headers=header)) as fake:
        gateway.deploy(a_deployment(), fake)
        content = await gateway.call()
        assert content.header("x-gpu-trace") is None
        assert content.header("trailer") is None


async def test_lease_is_asked_for_below_its_own_span() -> None:
    bert = 64 * "b"
    async with (
        a_gateway() as gateway,
        a_function(says(headers=f"X-Gpu-Models: {bert}\r\n")) as fake,
    ):
        gateway.deploy(a_deployment("", enabled="true"), fake)
        await gateway.call()
        spans = by_name(await called(gateway, f"traceparent: {SAID}"))
        (context,) = gateway.leases.traces
        assert context == TraceContext(TRACE, spans["lease"].span_id, sampled=True)
        assert spans["lease"].attributes["gpufaas.lease"] == 1
        assert spans["lease"].end_ns <= spans["function"].begin_ns


# -- a function's report --------------------------------------------------------------------------


async def test_handler_is_within_the_call_when_the_function_reports_it() -> None:
    async def behave(got: object, writer: asyncio.StreamWriter) -> None:
        begin_us = time.time_ns() // 1_000
        await asyncio.sleep(0.02)
        head = f"X-Gpu-Trace: 1 h;{begin_us};20000;q=7\r\n"
        await writes(f"HTTP/1.1 200 OK\r\n{head}Content-Length: 0\r\n\r\n".encode())(got, writer)  # type: ignore[arg-type] # it is one

    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment(), fake)
        spans = by_name(await called(gateway))
        handler, function = spans["handler"], spans["function"]
        assert handler.parent_id == function.span_id
        assert handler.service == "echo.openfaas-fn"
        assert handler.end_ns - handler.begin_ns == 20_000_000
        assert handler.attributes["gpufaas.queued_s"] == 7e-6


async def test_handlers_time_follows_a_stream() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"
        b"0\r\nX-Gpu-Trace: 1 h;1;5000;q=0\r\nX-Other: 1\r\n\r\n"
    )

    async def behave(got: object, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        await writes(answer)(got, writer)  # type: ignore[arg-type] # it is one

    async with a_gateway() as gateway, a_function(behave) as fake:
        gateway.deploy(a_deployment(), fake)
        spans = by_name(await called(gateway))
        assert spans["handler"].took_s == 0.005


# -- what is remembered ---------------------------------------------------------------------------


async def test_every_attempt_is_shown_when_an_instance_breaks_off() -> None:
    async def hangs_up(got: object, writer: asyncio.StreamWriter) -> None:
        del got
        writer.close()

    async with (
        a_gateway() as gateway,
        a_function(hangs_up) as broken,
        a_function(says()) as fine,
    ):
        gateway.deploy(a_deployment("", retry="true"), broken, fine)
        found: list[Span] = []
        while len(found) < 6:
            found = await called(gateway)
        first, second = [span for span in found if span.name == "function"]
        assert "closed the connection" in first.error
        assert second.error == ""
        assert len({span.span_id for span in found}) == len(found)


async def test_failed_call_explains_why() -> None:
    async with a_gateway(connect_s=0.2) as gateway, a_function(writes(b"junk")) as fake:
        gateway.deploy(a_deployment(), fake)
        whole = by_name(await called(gateway))["call echo.openfaas-fn"]
        assert "no valid HTTP" in whole.error
        assert whole.attributes["http.response.status_code"] == 502


def test_plain_calls_do_not_drive_out_what_is_looked_for() -> None:
    tracer = CallTracer(keep=2)
    for call_id, status, gpu in (("gpu", 200, True), ("failed", 502, False)):
        journey = tracer.begin(call_id, "f", "GET", (b"", b""), gpu=gpu)
        tracer.ended(journey, status)
    for number in range(5):
        tracer.ended(tracer.begin(f"c{number}", "f", "GET", (b"", b""), gpu=False), 200)
    assert tracer.spans("gpu")
    assert tracer.spans("failed")
    assert tracer.spans("c4")
    assert not tracer.spans("c0")
    assert [call["call_id"] for call in tracer.latest(2)] == ["c4", "c3"]


def test_call_that_broke_off_is_marked_as_failed_whatever_its_status() -> None:
    tracer = CallTracer()
    for error in ("", "f broke off"):
        tracer.ended(tracer.begin("c", "f", "GET", (b"", b""), gpu=False), 200, error)
    assert [call["failed"] for call in tracer.latest(2)] == [True, False]


def test_running_call_is_marked_as_running() -> None:
    tracer = CallTracer()
    tracer.begin("c1", "f", "GET", (b"", b""), gpu=False)
    (whole,) = tracer.spans("c1")
    assert whole.attributes["gpufaas.running"] is True


@pytest.mark.parametrize(
    ("content", "ratio", "exported"),
    [
        ("", 1.0, True),
        ("", 0.0, False),
        (SAID, 0.0, True),
        (SAID[:-1] + "0", 1.0, False),
    ],
)
def test_callers_choice_goes_before_ours(content: str, ratio: float, exported: bool) -> None:  # noqa: FBT001 - a case
    sink = Kept()
    tracer = CallTracer(sink, ratio=ratio)
    journey = tracer.begin("c1", "f", "GET", (content.encode(), b""), gpu=False)
    tracer.ended(journey, 200)
    assert bool(sink.spans) is exported
    assert len([span for span in sink.spans if span.name == "call f"]) == int(exported)


def test_step_belongs_to_the_given_trace_and_keeps_its_failure() -> None:
    sink = Kept()
    tracer = CallTracer(sink)
    with (
        pytest.raises(ValueError, match="broken"),
        tracer.step("c1", "queue f", (SAID.encode(), b"a=1"), SpanKind.PRODUCER) as step,
    ):
        raise ValueError("broken")
    (span,) = sink.spans
    assert (span.parent_id, span.error, span.kind) == (CALLER, "broken", SpanKind.PRODUCER)
    headers = carrying([(b"traceparent", b"old"), (b"a", b"b")], step.trace)
    assert headers == [
        (b"a", b"b"),
        (b"traceparent", f"00-{TRACE}-{span.span_id}-01".encode()),
        (b"tracestate", b"a=1"),
    ]
    assert trace_headers_in(headers) == (headers[1][1], b"a=1")


# -- the routes -----------------------------------------------------------------------------------


async def test_routes_show_calls_to_who_may_see_them(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        content = await world.get("/function/none")
        assert content.status == 404
        assert (await world.get("/system/traces", who=NOBODY)).status == 401
        assert (await world.get("/system/traces")).body["calls"] == []
        assert (await world.ask("POST", "/system/traces")).status == 405
        unknown = await world.get("/system/traces/a%20b")
        assert unknown.status == 404
        assert "call a b is unknown: this gateway remembers 0 calls" in json.dumps(unknown.body)
        journey = world.gateway.tracer.begin("a/b c", "f", "GET", (b"", b""), gpu=True)
        world.gateway.tracer.ended(journey, 200)
        found = await world.get("/system/traces/a%2Fb%20c")
        assert [span["name"] for span in found.body["spans"]] == ["call f"]
        assert found.body["memory"]["calls"] == 1


def test_call_without_an_id_is_given_a_uuid_that_names_its_trace() -> None:
    tracer = CallTracer()
    journey = tracer.begin("", "f", "GET", (b"", b""), gpu=False)
    named = uuid.UUID(journey.call_id)
    assert (named.version, named.variant, named.hex) == (4, uuid.RFC_4122, journey.trace_id)
    other = tracer.begin("mine", "f", "GET", (SAID.encode(), b""), gpu=False)
    assert (other.call_id, other.trace_id) == ("mine", TRACE)


async def test_line_about_a_failed_call_names_its_trace() -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    keep = Keep()
    keep.setFormatter(JsonLines())
    logging.getLogger("gateway_ext").addHandler(keep)
    try:
        async with a_gateway() as gateway, a_function(writes(b"junk")) as fake:
            gateway.deploy(a_deployment(), fake)
            content = await gateway.call(headers=[f"traceparent: {SAID}"])
    finally:
        logging.getLogger("gateway_ext").removeHandler(keep)
    (line,) = map(json.loads, lines)
    assert line["level"] == "warning"
    assert line["call_id"] == content.header("x-call-id")
    assert (line["trace_id"], line["function"]) == (TRACE, "echo.openfaas-fn")
