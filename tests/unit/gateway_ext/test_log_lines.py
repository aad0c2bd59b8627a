"""Log lines as JSON."""

import json
import logging

from gateway_ext.log_lines import JsonLines


def shown(message: str, *args: object, error: Exception | None = None) -> dict[str, str]:
    info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("gateway", logging.WARNING, "f.py", 1, message, args, info)
    record.created = 1.5
    text = JsonLines().format(record)
    assert "\n" not in text
    found: dict[str, str] = json.loads(text)
    return found


def test_a_line_says_when_who_and_what() -> None:
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
