"""The context in W3C's headers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.telemetry.traces import Span, SpanKind, TraceContext, plain_span, trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_context_is_read_from_a_header() -> None:
    assert trace_of(f"00-{TRACE}-{SPAN}-01", "a=b") == TraceContext(TRACE, SPAN, True, "a=b")
    assert trace_of(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN)


@pytest.mark.parametrize(("flags", "sampled"), [("03", True), ("ff", True), ("02", False)])
def test_only_the_lowest_flag_means_sampled(flags: str, *, sampled: bool) -> None:
    found = trace_of(f"00-{TRACE}-{SPAN}-{flags}")
    assert found is not None
    assert found.sampled is sampled
    assert found.header == f"00-{TRACE}-{SPAN}-0{int(sampled)}"


def test_a_later_version_may_have_more_fields() -> None:
    assert trace_of(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)
    assert trace_of(f"01-{TRACE}-{SPAN}-01more") is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE[:-1]}\u0660-{SPAN}-01",
    ],
)
def test_what_is_not_valid_is_no_context(header: str) -> None:
    assert trace_of(header) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=b\r\nx-evil: 1", "a=\x00"])
def test_state_that_cannot_be_passed_on_is_dropped(state: str) -> None:
    assert trace_of(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, True)


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())
def test_every_context_is_read_as_it_was_written(trace: int, span: int, sampled: bool) -> None:  # noqa: FBT001 - hypothesis hands it over so
    context = TraceContext(f"{trace:032x}", f"{span:016x}", sampled, "a=1,b=2")
    assert trace_of(context.header, context.state) == context


def test_span_is_shown_without_what_is_empty() -> None:
    span = Span(TRACE, SPAN, "", "n", "s", 1, 3, SpanKind.CLIENT, {"a": 1})
    assert plain_span(span) == {
        "trace_id": TRACE,
        "span_id": SPAN,
        "parent_id": "",
        "name": "n",
        "service": "s",
        "begin_ns": 1,
        "end_ns": 3,
        "kind": "client",
        "attributes": {"a": 1},
    }
