"""What a handler gets and gives: events, answers; and the runtime's settings."""

import json
import math

import pytest

from gateway_ext.openfaas import quantities
from gateway_ext.runtime.handler_values import (
    BadResponse,
    HandlerEvent,
    Headers,
    answer_of,
    piece_of,
)
from gateway_ext.runtime.settings import BadRuntimeSetting, RuntimeSettings


def test_event_has_what_the_python3_http_template_gives() -> None:
    headers = Headers([("X-A", "1"), ("x-a", "2"), ("Content-Type", "text/plain")])
    event = HandlerEvent("PUT", "/a%20b?c=1&c=2&d=%C3%A9&e=", headers, b"body")
    assert (event.method, event.path, event.body) == ("PUT", "/a b", b"body")
    assert event.headers["CONTENT-TYPE"] == "text/plain"
    assert "x-A" in event.headers
    assert event.headers.get("missing") is None
    assert event.headers.getlist("X-a") == ["1", "2"]
    assert list(event.headers) == ["X-A", "Content-Type"]
    assert event.query.to_dict() == {"c": "1", "d": "é", "e": ""}
    assert event.query.getlist("c") == ["1", "2"]


@pytest.mark.parametrize(
    ("returned", "status", "kind", "body"),
    [
        (None, 200, None, b""),
        ("é", 200, "text/plain; charset=utf-8", "é".encode()),
        (b"\x00", 200, "application/octet-stream", b"\x00"),
        ({"a": [1]}, 200, "application/json", b'{"a": [1]}'),
        ([1, 2], 200, "application/json", b"[1, 2]"),
        (True, 200, "application/json", b"true"),
        ({"body": "x"}, 200, "text/plain; charset=utf-8", b"x"),
        ({"statusCode": 404}, 404, None, b""),
        ({"statusCode": "201", "body": {"b": 1}}, 201, "application/json", b'{"b": 1}'),
        ({"body": 1, "other": 2}, 200, "application/json", b'{"body": 1, "other": 2}'),
    ],
)
def test_answer_is_made_of_what_was_returned(
    returned: object, status: int, kind: str | None, body: bytes
) -> None:
    answer = answer_of(returned)
    assert (answer.status, dict(answer.headers).get("Content-Type"), answer.body) == (
        status,
        kind,
        body,
    )


def test_answer_has_the_handlers_headers_but_not_those_of_the_connection() -> None:
    headers = {"content-type": "image/png", "X-A": 1, "Content-Length": 99, "Connection": "close"}
    answer = answer_of({"statusCode": 200, "body": b"x", "headers": headers})
    assert answer.headers == [("content-type", "image/png"), ("X-A", "1")]


@pytest.mark.parametrize(
    "returned",
    [
        object(),
        {"statusCode": 99},
        {"statusCode": "many"},
        {"statusCode": "2_00"},
        {"statusCode": " 200"},
        {"statusCode": "٢٠٠"},
        {"statusCode": 200, "headers": {"X-A": "1\r\nX-B: 2"}},
        {"statusCode": 200, "headers": {"X A": "1"}},
        {"statusCode": 200, "headers": {"X-A": "\u20ac"}},
        {"statusCode": 200, "headers": ["X-A"]},
        {"statusCode": 200, "headers": 5},
    ],
)
def test_answer_is_refused_when_it_cannot_be_sent(returned: object) -> None:
    with pytest.raises(BadResponse):
        answer_of(returned)


def test_pieces_are_text_bytes_or_lines_of_json() -> None:
    assert piece_of("é") == "é".encode()
    assert piece_of(bytearray(b"x")) == b"x"
    assert json.loads(piece_of({"a": 1})) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1m30s", 90.0),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("2h", 7200),
        ("1.5", 1.5),
        ("1\N{GREEK SMALL LETTER MU}s", 1e-6),
    ],
)
def test_settings_read_seconds_and_go_durations(text: str, seconds: float) -> None:
    assert RuntimeSettings.from_environment({"exec_timeout": text}).exec_timeout_s == seconds
    assert quantities.seconds(text) == seconds  # what the gateway lets pass is understood here


def test_a_time_of_0_is_no_limit_for_stopping_either() -> None:
    assert RuntimeSettings.from_environment({"write_timeout": "0"}).stop_timeout_s == math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [("exec_timeout", "soon"), ("GPUFAAS_THREADS", "0"), ("PORT", "http"), ("max_inflight", "-1")],
)
def test_settings_name_the_variable_when_it_is_wrong(name: str, value: str) -> None:
    with pytest.raises(BadRuntimeSetting, match=name):
        RuntimeSettings.from_environment({name: value})


def test_settings_listen_on_the_port_of_containers_by_default() -> None:
    assert RuntimeSettings.from_environment({}).listen == "tcp:0.0.0.0:8080"
    assert RuntimeSettings.from_environment({"PORT": "99"}).listen == "tcp:0.0.0.0:99"
