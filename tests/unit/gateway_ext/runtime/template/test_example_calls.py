"""The calls of `example.json`: read strictly, made in order, and their failures told."""

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from gateway_ext.runtime.handler_values import HandlerContext, HandlerEvent
from gateway_ext.runtime.template.example_calls import BadExample, ExampleCall, examples_in, make


def listed(folder: Path, content: object) -> list[ExampleCall]:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "example.json").write_text(text)
    return examples_in(folder)


def test_calls_are_read_with_their_defaults(tmp_path: Path) -> None:
    assert examples_in(tmp_path) == []
    assert listed(tmp_path, {"body": "text"}) == [ExampleCall("POST", "/", {}, b"text")]
    many = [
        {"body": "1", "method": "PUT", "path": "/x?y=1", "headers": {"A": "b"}},
        {"body_base64": "AAE="},
    ]
    assert listed(tmp_path, many) == [
        ExampleCall("PUT", "/x?y=1", {"A": "b"}, b"1"),
        ExampleCall("POST", "/", {}, b"\0\1"),
    ]


def test_json_body_implies_its_content_type_unless_one_is_given(tmp_path: Path) -> None:
    calls = [
        {"body": {"pixels": []}},
        {"body": [1], "headers": {"content-TYPE": "application/x-mine"}},
        {"body": "text"},
        {"body_base64": "AAAA"},
    ]
    (tmp_path / "example.json").write_text(json.dumps(calls))
    found = [call.headers for call in examples_in(tmp_path)]
    assert found == [
        {"Content-Type": "application/json"},
        {"content-TYPE": "application/x-mine"},
        {},
        {},
    ]


@pytest.mark.parametrize(
    "content", ["{", [1], {"unknown": 1}, {"body_base64": "?"}, {"headers": 1}, [{}] * 17]
)
def test_file_is_refused_when_it_is_no_list_of_calls(tmp_path: Path, content: object) -> None:
    with pytest.raises(BadExample, match=r"example\.json"):
        listed(tmp_path, content)


def test_answers_of_all_kinds_are_read_to_their_end() -> None:
    seen: list[str] = []

    def noted(number: int) -> str:
        seen.append(str(number))
        return "piece"

    def plain(event: HandlerEvent, context: HandlerContext) -> object:
        seen.append(f"{event.path} {event.query['a']} on {context.hostname}")
        return map(noted, range(2))

    async def later(event: HandlerEvent, context: HandlerContext) -> object:
        del event, context
        seen.append("later")
        return "done"

    async def pieces(event: HandlerEvent, context: HandlerContext) -> AsyncIterator[str]:
        del event, context
        yield "piece"
        seen.append("pieces")

    calls = [ExampleCall("GET", "/p?a=b", {}, b"")]
    for handle in (plain, later, pieces):
        make(handle, calls, "host")
    assert seen == ["/p b on host", "0", "1", "later", "pieces"]


@pytest.mark.parametrize("answer", [{"statusCode": 500}, {"statusCode": 404, "body": "no"}])
def test_error_answer_fails(answer: object) -> None:
    with pytest.raises(BadExample, match=r"call 1 of example\.json was answered"):
        make(lambda _, __: answer, [ExampleCall("GET", "/", {}, b"")], "host")


def test_raised_error_fails() -> None:
    def handle(event: HandlerEvent, context: HandlerContext) -> object:
        raise ValueError(f"no such thing: {event.body!r} on {context.hostname}")

    with pytest.raises(BadExample, match="no such thing"):
        make(handle, [ExampleCall("GET", "/", {}, b"")], "host")


class PutOff(Exception):
    """As the shim's errors say that a call may come later."""

    answer_status = 429


@pytest.mark.parametrize(("times", "failure"), [(2, ""), (3, r"call 2 .* raised PutOff")])
def test_calls_are_made_again_as_often_as_there_are_pauses_when_they_are_put_off(
    times: int, failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths: list[str] = []

    def handle(event: HandlerEvent, context: HandlerContext) -> object:
        del context
        paths.append(event.path)
        if event.path == "/quota" and len(paths) <= 1 + times:
            raise PutOff("a quota is used up")
        return "done"

    calls = [ExampleCall("GET", path, {}, b"") for path in ("/first", "/quota")]
    with pytest.raises(BadExample, match=failure) if failure else nullcontext():
        make(handle, calls, "host", pauses_s=(0.0, 0.0))
    assert paths == ["/first", *["/quota"] * 3]
    assert capsys.readouterr().err.count("put off: a quota is used up; it is made again") == 2


def test_call_is_not_made_again_when_it_fails_for_good() -> None:
    made = []

    def handle(event: HandlerEvent, context: HandlerContext) -> object:
        made.append((event, context))
        raise ValueError

    with pytest.raises(BadExample):
        make(handle, [ExampleCall("GET", "/", {}, b"")], "host", pauses_s=(0.0, 0.0))
    assert len(made) == 1
