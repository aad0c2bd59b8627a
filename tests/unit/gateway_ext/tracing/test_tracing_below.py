"""The spans of a function's report: moved to our clock, bounded, and always a tree."""

import time
from collections.abc import Iterable

import pytest

from common.telemetry.traces import Span
from gateway_ext.tracing.journey import BELOW, IN_ATTEMPT, Journey
from gateway_ext.tracing.tracer import read_report, spans_of

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GRAPH = 16 * "c"


def by_name(spans: Iterable[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def a_journey(report_text: bytes, *, took_s: float = 1.0) -> Journey:
    journey = Journey("c1", "f", "POST", TRACE, 100, gpu=True, sampled=False)
    attempt = journey.attempt()
    attempt.seated_s = attempt.asked_s = journey.began_s
    attempt.answered_s = attempt.ended_s = journey.ended_s = journey.began_s + took_s
    attempt.keep_report(report_text)
    return journey


def test_other_clock_is_shifted_when_its_times_are_impossible() -> None:
    """An hour ahead: there and back take the same time then."""
    journey = a_journey(b"")
    hour_ahead_us = journey.began_ns // 1_000 + 3_600_000_000
    call = f"c;{GRAPH};{hour_ahead_us + 100_000};200000;l=7;m=ab;b=1;w=0;i=0;k=100000;o=0"
    journey.attempts[0].keep_report(f"1 h;{hour_ahead_us};600000;q=0 {call}".encode())
    spans = by_name(spans_of(journey, journey.ended_s))
    function, handler = spans["function"], spans["handler"]
    assert handler.begin_ns - function.begin_ns == pytest.approx(200_000_000, abs=2_000)
    assert spans["graph call"].begin_ns - handler.begin_ns == 100_000_000
    assert spans["compute"].begin_ns - spans["graph call"].begin_ns == 50_000_000
    assert spans["compute"].parent_id == spans["graph call"].span_id == GRAPH


def test_call_begins_by_the_clocks_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation replaces them, and a call's deadline counts from when it began."""
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    monkeypatch.setattr(time, "time_ns", lambda: 8)
    call = Journey("c1", "f", "POST", TRACE, 100, gpu=True, sampled=False)

    assert (call.began_s, call.began_ns, call.attempt().began_s) == (7.0, 8, 7.0)


def test_wait_for_a_lease_comes_before_the_work() -> None:
    journey = a_journey(b"")
    at_us = journey.began_ns // 1_000 + 1_000
    acquire = f"a;{GRAPH};{at_us};300000;l=7;q=100000;d=200000;r=a%2Fb/c"
    call = f"c;{GRAPH};{at_us};500000;l=7;m=ab;b=2;w=0;i=10000;k=100000;o=10000"
    journey.attempts[0].keep_report(f"1 h;{at_us};600000;q=0 {acquire} {call} x;3;9000".encode())
    spans = spans_of(journey, journey.ended_s)
    (lease,) = (span for span in spans if span.name == "lease")
    (inputs,) = (span for span in spans if span.name == "inputs")
    (handler,) = (span for span in spans if span.name == "handler")
    assert lease.attributes["gpufaas.request"] == "a/b/c"
    assert lease.parent_id == GRAPH
    assert lease.end_ns <= inputs.begin_ns
    assert handler.attributes["gpufaas.calls_left_out"] == 3
    assert len({span.span_id for span in spans}) == len(spans)


@pytest.mark.parametrize(
    "report_text",
    [
        b"2 h;1;5",
        b"1 h;x;5",
        b"1 h;-1;5",
        b"1 h",
        b"1 c;short;1;5",
        b"1 c;;5;6",
        b"1 c",
        b"1 ;;;",
        b"\xff\xfe",
        b"1 h;" + b"9" * 30 + b";1",
        b"1 h;1;5;q=0" + b"x" * 9_000,
    ],
)
def test_what_cannot_be_read_is_left_out(report_text: bytes) -> None:
    spans = by_name(spans_of(a_journey(report_text), time.monotonic()))
    assert "handler" not in spans
    assert "function" in spans


@pytest.mark.parametrize("span_id", ["", "0" * 16, "c" * 15, "C" * 16])
@pytest.mark.parametrize("letter", ["c", "a"])
def test_call_without_a_proper_id_is_left_out(letter: str, span_id: str) -> None:
    found = read_report(f"1 h;1;2;q=5 {letter};{span_id};5;6".encode())
    assert (found.calls, found.acquires) == ([], [])


@pytest.mark.parametrize("handler_us", [(10**18 - 1, 10**18 - 1), (0, 10**18 - 1), (10**18 - 1, 0)])
@pytest.mark.parametrize("call_us", [(10**18 - 1, 10**18 - 1), (0, 5), (0, 10**18 - 1)])
def test_no_span_leaves_its_attempt_whatever_the_function_reports(
    handler_us: tuple[int, int], call_us: tuple[int, int]
) -> None:
    huge = 10**18 - 1
    handler, call = ("{};{}".format(*times) for times in (handler_us, call_us))
    report_text = f"1 h;{handler};q=0 c;{GRAPH};{call};k={huge};w={huge} a;{GRAPH};{call}"
    journey = a_journey(report_text.encode())
    spans = spans_of(journey, journey.ended_s)
    function = by_name(spans)["function"]
    assert {"handler", "graph call", "lease", "compute"} <= {span.name for span in spans}
    for span in spans:
        assert function.begin_ns <= span.begin_ns <= span.end_ns <= function.end_ns


def test_call_whose_id_is_taken_is_left_out() -> None:
    wrong = []
    for number in (*range(12), BELOW, BELOW + 3, IN_ATTEMPT - 1, "caller", GRAPH):
        journey = a_journey(b"")
        journey.parent = CALLER
        span_id = {"caller": CALLER, GRAPH: GRAPH}.get(str(number)) or journey.span_id(int(number))
        calls = f"c;{GRAPH};1;5;k=5 c;{span_id};1;5;k=5"
        journey.attempts[0].keep_report(f"1 h;1;50;q=0 {calls}".encode())
        spans = spans_of(journey, journey.ended_s)
        graph_calls = [span.span_id for span in spans if span.name == "graph call"]
        if graph_calls != [GRAPH] or len({span.span_id for span in spans}) != len(spans):
            wrong.append((number, graph_calls, spans))
    assert wrong == []


def test_facts_of_strangers_are_bounded() -> None:
    found = read_report(b"1 h;1;2;q=5;long=1;m=" + b"y" * 500 + b";z=%0A;ok")
    assert found.handler is not None
    assert found.handler.facts == {"q": "5"}
