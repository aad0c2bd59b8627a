"""Conditions of stages: what they compare, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from gateway_ext.workflows.conditions import (
    BadCondition,
    JsonPath,
    Unmeetable,
    condition,
    value_at,
)
from tests.kit.outcomes import instead_of, outcome


@dataclass(frozen=True)
class Answer:
    status: int | None
    body: str

    def at(self, path: JsonPath) -> Any:
        try:
            return value_at(json.loads(self.body), path)
        except ValueError as error:
            raise Unmeetable("no JSON") from error


ANSWERS: Mapping[str, Answer] = {
    "a": Answer(200, '{"n": 3, "t": "x y", "l": [{"k": true}], "a.b": 1, "z": null, "7": "seven"}'),
    "b": Answer(404, "not JSON"),
}
NAMES = ("a", "b", "gone")


COMPARED = (
    ("a.status == 200", True),
    ("a.status >= 300", False),
    ("b.status == 404 and a.json.n < 4", True),
    ("b.status == 200 and a.json.n < 4 or a.json.n == 3", True),
    ("a.json.n == 3 or b.status == 200 and a.json.n == 4", True),
    ('a.json.t == "x y"', True),
    ('a.json["a.b"] == 1', True),
    ('a.json.7 == "seven"', True),
    ("a.json.l[0].k == true", True),
    ("a.json.l.0.k == true", True),
    ("a.json.l[0].k == 1", False),
    ("a.json.l[0].k != 1", True),
    ("a.json.l[1].k == null", True),
    ("a.json.missing.deeper == null", True),
    ("a.json.missing > 1", False),
    ("a.json.z == null", True),
    ("a.json.n == -3", False),
    ("a.json.n==3.0e0", True),
    ('a.json.t > "x"', True),
    ("gone.status == null", True),
    ("gone.json.x == null", True),
    ("gone.status < 500", False),
)


def test_conditions_compare_answers() -> None:
    def holds(text: str) -> bool:
        return condition(text, NAMES).holds(ANSWERS)

    wrong = [
        (text, found)
        for text, expected in COMPARED
        if (found := outcome(holds, text)) is not expected
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text", ["b.json.x == 1", "a.json.t > 1", "a.json.l > 1", "a.json.n < null"]
)
def test_what_cannot_be_compared_is_no_answer(text: str) -> None:
    with pytest.raises(Unmeetable):
        condition(text, NAMES).holds(ANSWERS)


def test_single_stage_need_not_be_named() -> None:
    found = condition("status == 200 and json.n == 3", ["a"])

    assert found.holds(ANSWERS)
    assert found.sources == {"a"}


NO_CONDITIONS = (
    "", " ", "a", "a.status", "a.status ==", "== 200", "a.status = 200", "a.status == 200 and",
    "a.status == 200 or", "or a.status == 200", "a.status == 200 200", "a.status == x",
    "c.status == 200", "status == 200", "a.body == 1", "a.status.x == 1", "a.json[x] == 1",
    "__import__('os') == 1", "a.json.n == 1e999", 'a.json["\\x"] == 1', 'a.status == "',
    "a.status == 1 and " * 32 + "a.status == 1", "a.status == 200" + " " * 1000,
    "a.status == 200 AND a.status == 1", "a.json..n == 1", "a.json.n == [1]",
)  # fmt: skip


EXPECTED = (
    ("a.status >> 1", "'>>' stands where one of == != < <= > >= is expected"),
    ("a.status = 200", "'=' stands where one of == != < <= > >= is expected"),
    (
        "a.status > > 1",
        "'>' stands where a number, a text in \"\", true, false or null is expected",
    ),
    ("a.status == 1 AND a.status == 1", "'AND' stands where `and` or `or` is expected"),
)


@pytest.mark.parametrize(("text", "message"), EXPECTED)
def test_refusal_says_what_stands_there_and_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(BadCondition) as raised:
        condition(text, NAMES)
    assert str(raised.value) == message


def test_what_is_no_condition_is_refused() -> None:
    wrong = [
        (text, taken)
        for text in NO_CONDITIONS
        if (taken := instead_of(BadCondition, condition, text, NAMES))
    ]
    assert wrong == []
