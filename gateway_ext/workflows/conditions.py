"""Conditions of stages, `detect.status == 200 and detect.json.found[0].sure > 0.5`; pure.

Comparisons of a status, or of a field of a JSON answer, with a constant; `and` binds before `or`.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias

from common.numerals import natural

MOST_CHARACTERS = 1_000
MOST_COMPARISONS = 32
_GARBAGE = 502

_NAME = r"[a-zA-Z0-9_][-a-zA-Z_0-9]*"
_TEXT = r'"(?:[^"\\]|\\.)*"'
_STEP = re.compile(rf"\.({_NAME})|\[([0-9]{{1,9}}|{_TEXT})\]")
_TOKEN = re.compile(
    rf"\s*(?:(?P<text>{_TEXT})"
    rf"|(?P<number>-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}})?(?![-\w.\[]))"
    rf"|(?P<word>{_NAME}(?:{_STEP.pattern})*)"
    r"|(?P<sign>[=!<>]+))"
)
_STATUS, _JSON = "status", "json"
_CONSTANTS = {"true": True, "false": False, "null": None}
_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Steps into a JSON value: fields and places.
JsonPath: TypeAlias = tuple[str | int, ...]
_PARTS = 3  # of a comparison: what, how, with what
_ORDERS = frozenset({"<", "<=", ">", ">="})


class BadCondition(ValueError):
    """The text is no condition."""


class Unmeetable(Exception):
    """An answer has nothing that could be compared or joined; `status` is the workflow's."""

    def __init__(self, why: str, status: int = _GARBAGE) -> None:
        super().__init__(why)
        self.status = status


class ReadAnswer(Protocol):
    """The answer of a stage, or the request, as conditions see it."""

    @property
    def status(self) -> int | None:
        """None of the request."""

    def at(self, path: JsonPath) -> Any:
        """Raise Unmeetable if the body is not JSON."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    source: str
    path: JsonPath | None  # into the JSON value; None: the status
    sign: str
    constant: str | float | bool | None

    def holds(self, answers: Mapping[str, ReadAnswer]) -> bool:
        value = self._value(answers.get(self.source))
        if self.sign not in _ORDERS:
            # True is 1 in Python, and not in JSON.
            same = isinstance(value, bool) == isinstance(self.constant, bool)
            return (same and value == self.constant) == (self.sign == "==")
        if value is None:
            return False
        if _kind(value) != _kind(self.constant):
            raise Unmeetable(f"{self.source}: {_shown(value)} {self.sign} {_shown(self.constant)}")
        return _SIGNS[self.sign](value, self.constant)

    def _value(self, answer: ReadAnswer | None) -> Any:
        if answer is None:  # the stage was skipped
            return None
        if self.path is None:
            return answer.status
        return answer.at(self.path)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the answers of the stages `sources`."""

    text: str
    sources: frozenset[str]
    _any_of: tuple[tuple[_Comparison, ...], ...]

    def paths(self, source: str) -> Iterator[JsonPath]:
        """What it compares of the JSON of a source."""
        for comparison in chain.from_iterable(self._any_of):
            if comparison.source == source and comparison.path is not None:
                yield comparison.path

    def holds(self, answers: Mapping[str, ReadAnswer]) -> bool:
        """Whether it is met; skipped stages are missing in `answers`, and all of theirs is null."""
        return any(all(comparison.holds(answers) for comparison in group) for group in self._any_of)


def value_at(value: Any, path: JsonPath) -> Any:
    """What is there; None for nothing. Of an array or an object nothing but its kind is kept."""
    for step in path:
        value = _inner(value, step)
    return type(value)() if isinstance(value, dict | list) else value


def condition(text: str, sources: Collection[str]) -> Condition:
    """Parse a condition on these stages; BadCondition says what is wrong.

    With one stage its name may be left out: `status == 200`.
    """
    if len(text) > MOST_CHARACTERS:
        raise BadCondition(f"it is longer than {MOST_CHARACTERS} characters")
    groups = tuple(_groups(list(_tokens(text)), sources))
    comparisons = [comparison for group in groups for comparison in group]
    if len(comparisons) > MOST_COMPARISONS:
        raise BadCondition(f"it has more than {MOST_COMPARISONS} comparisons")
    return Condition(text, frozenset(comparison.source for comparison in comparisons), groups)


def _groups(
    tokens: list[tuple[str, str]], sources: Collection[str]
) -> Iterator[tuple[_Comparison, ...]]:
    group: list[_Comparison] = []
    while True:
        group.append(_comparison(tokens[:_PARTS], sources))
        if len(tokens) == _PARTS:
            yield tuple(group)
            return
        joint, tokens = tokens[_PARTS][1], tokens[_PARTS + 1 :]
        if joint not in {"and", "or"}:
            raise BadCondition(f"{joint!r} stands where `and` or `or` is expected")
        if joint == "or":
            yield tuple(group)
            group = []


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise BadCondition(f"{text[at:].strip()[:40]!r} is not understood")
        kind = next(name for name in ("text", "number", "word", "sign") if token[name] is not None)
        yield kind, token[kind]
        at = token.end()


def _comparison(tokens: list[tuple[str, str]], sources: Collection[str]) -> _Comparison:
    if [kind for kind, _ in tokens[:2]] != ["word", "sign"] or len(tokens) < _PARTS:
        shown = " ".join(text for _, text in tokens)
        raise BadCondition(f"{shown!r}: a comparison such as STAGE.status == 200 is expected")
    if tokens[1][1] not in _SIGNS:
        raise BadCondition(f"{tokens[1][1]!r} stands where one of {' '.join(_SIGNS)} is expected")
    source, path = _operand(tokens[0][1], sources)
    return _Comparison(source, path, tokens[1][1], _constant(*tokens[2]))


def _operand(text: str, sources: Collection[str]) -> tuple[str, JsonPath | None]:
    head = re.match(_NAME, text)
    assert head is not None  # the text is a token
    steps = list(_STEP.finditer(text, head.end()))
    if head[0] in {_STATUS, _JSON} and head[0] not in sources:
        if len(sources) != 1:
            raise BadCondition(f"{text}: name the stage, as in {min(sources, default='')}.{text}")
        (source,), what = sources, head[0]
    else:
        source = head[0]
        what = steps.pop(0)[1] if steps else ""
    if source not in sources:
        raise BadCondition(f"{source} is not among the stages that are waited for")
    if what == _STATUS and not steps:
        return source, None
    if what != _JSON:
        raise BadCondition(f"{text}: {source}.status or {source}.json.FIELD is expected")
    return source, tuple(_step(step) for step in steps)


def _step(match: re.Match[str]) -> str | int:
    if match[1] is not None:
        return match[1]
    inner: str = match[2]
    return _text(inner) if inner.startswith('"') else int(inner)


def _constant(kind: str, text: str) -> str | float | bool | None:
    if kind == "text":
        return _text(text)
    if kind == "number":
        number = float(text)
        if not math.isfinite(number):
            raise BadCondition(f"{text} is too large")
        return number
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    expected = 'a number, a text in "", true, false or null'
    raise BadCondition(f"{text!r} stands where {expected} is expected")


def _text(quoted: str) -> str:
    try:
        text: str = json.loads(quoted)
    except ValueError as error:
        raise BadCondition(f"{quoted}: {error}") from error
    return text


def _inner(value: Any, step: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(str(step))
    if isinstance(value, list):
        at = natural(str(step))
        return value[at] if at is not None and at < len(value) else None
    return None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    return "number" if isinstance(value, int | float) else type(value).__name__


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]
