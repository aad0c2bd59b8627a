"""Log lines as JSON, and what they are about."""

import json
import logging
from typing import Any

import pytest

from common.telemetry.traces import TraceContext
from common.telemetry.work_context import ABOUT, Work
from gpufaas.errors import CommandError
from gpufaas.log_format import PLAIN, JsonLines, PlainLines, configure_logs

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def shown(
    message: str, *args: object, error: Exception | None = None, **extra: object
) -> dict[str, str]:
    info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("gateway", logging.WARNING, "f.py", 1, message, args, info)
    record.created = 1.5
    record.__dict__.update(extra)
    text = JsonLines().format(record)
    assert "\n" not in text
    found: dict[str, str] = json.loads(text)
    return found


def shown_in(work: Work, message: str, **extra: Any) -> dict[str, str]:
    before = ABOUT.set(work)
    try:
        return shown(message, **extra)
    finally:
        ABOUT.reset(before)


def test_a_line_has_time_source_and_message() -> None:
    assert shown("%s is gone", "f") == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "logger": "gateway",
        "message": "f is gone",
    }


def test_a_line_of_a_call_names_it() -> None:
    assert shown("call %s: f: broke off", "abc-1")["call_id"] == "abc-1"


def test_an_error_is_shown_within_its_line() -> None:
    assert "ValueError: bad" in shown("failed", error=ValueError("bad"))["trace"]


def test_a_line_names_what_the_work_at_hand_is_about() -> None:
    work = Work(TRACE, "c1", "f.openfaas-fn", "r1", 7)
    line = shown_in(work, "lease 7 was not given back")
    assert {name: line[name] for name in ("call_id", "trace_id", "function", "request")} == {
        "call_id": "c1",
        "trace_id": TRACE.trace_id,
        "function": "f.openfaas-fn",
        "request": "r1",
    }
    assert line["lease"] == "7"


def test_a_line_leaves_out_what_is_not_known() -> None:
    line = shown_in(Work(call_id="c1"), "hello")
    assert line["call_id"] == "c1"
    assert not {"trace_id", "function", "request", "lease"} & line.keys()


def test_a_line_about_another_request_is_not_about_the_work_at_hand() -> None:
    line = shown_in(Work(TRACE, "c1", request="r1"), "r2 waits", request="r2")
    assert line["request"] == "r2"
    assert "trace_id" not in line
    assert "call_id" not in line


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(CommandError, match="log_format: 'xml'"):
        configure_logs("info", "xml")


@pytest.mark.parametrize("text", ["a\rb", "\x1b[2J", "\x9b2J", "\x7f", "\x08"])
def test_a_message_holds_no_control_character(text: str) -> None:
    record = logging.LogRecord("gateway", logging.INFO, "f.py", 1, "call %s: gone", (text,), None)
    for form in (PlainLines(PLAIN), JsonLines()):
        assert form.format(record).isprintable()


def test_a_message_cannot_look_like_two() -> None:
    record = logging.LogRecord("gateway", logging.INFO, "f.py", 1, "call %s: gone", ("a\nb",), None)
    first, second = PlainLines(PLAIN).format(record).splitlines()
    assert first.endswith("gateway: call a")
    assert second == "    b: gone"


def test_a_traceback_cannot_look_like_a_message() -> None:
    error = ValueError("\x1b[31mred\n2026-01-01 INFO gateway: fake")
    info = (ValueError, error, None)
    record = logging.LogRecord("gateway", logging.ERROR, "f.py", 1, "failed", (), info, "f", "a\nb")
    first, *more = PlainLines(PLAIN).format(record).splitlines()
    assert first.endswith("gateway: failed")
    assert [line.removeprefix("    ") for line in more] == [
        "ValueError: \\u001b[31mred",
        "2026-01-01 INFO gateway: fake",
        "a",
        "b",
    ]
    assert all(line.startswith("    ") for line in more)
