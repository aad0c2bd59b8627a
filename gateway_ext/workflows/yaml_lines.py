"""Reads YAML within bounds, and knows the line of every value; pure."""

import math
import re
from typing import Any, TypeVar

import msgspec
import yaml

from common.numerals import whole
from gateway_ext.bounded_json import wrong_field

MOST_BYTES = 64 << 10
MOST_DEPTH = 8
MOST_VALUES = 4_000
MOST_PROBLEMS = 20

_STRING, _BOOL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:bool"
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class Problems:
    """What is wrong with a file, by line."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, line: int, text: str) -> None:
        # An escape in a file can be half a surrogate pair, which no answer and no log can hold.
        self._found.append((line, text.encode(errors="replace").decode()))

    @property
    def text(self) -> str:
        """A line for each problem, in the order of the file."""
        problems = dict.fromkeys(sorted(self._found))
        lines = [f"line {line}: {text}" for line, text in problems]
        left = len(lines) - MOST_PROBLEMS
        return "\n".join(lines[:MOST_PROBLEMS] + ([f"and {left} more"] if left > 0 else []))


_Fields = TypeVar("_Fields", bound=msgspec.Struct)


class YamlTable(dict[str, Any]):
    """A mapping of a file, with its lines; what YAML writes in other ways than JSON has no value.

    A whole number is an int, another one NaN; anything else that is no text, true or false is None.
    """

    def __init__(self, node: yaml.MappingNode, what: str, problems: Problems) -> None:
        super().__init__()
        self._what = what
        self._line = _line(node)
        self._lines: dict[str, int] = {}
        self._problems = problems
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if not name:
                problems.add(_line(key), f"{what}: a name is expected")
            elif name in self:
                problems.add(_line(key), f"{what}: {name[:80]} is given twice")
            else:
                self[name], self._lines[name] = _plain(value, name, problems), _line(key)

    def line_of(self, name: str) -> int:
        """The line of a key; of the table itself if the key is missing."""
        return self._lines.get(name, self._line)

    def wrong(self, name: str, text: object) -> None:
        self._problems.add(self.line_of(name), f"{self._what}: {name[:80]} {text}")

    def refuse(self, name: str, error: Exception) -> None:
        self._problems.add(self.line_of(name), f"{self._what}: {name}: {error}")

    def fields(self, kind: type[_Fields]) -> _Fields | None:
        """The table as this type; None, with the reasons noted, if it is none."""
        unknown = [name for name in self if name not in kind.__struct_fields__]
        for name in unknown:
            self.wrong(name, f"is unknown; there are {', '.join(kind.__struct_fields__)}")
        if unknown:
            return None
        try:
            return msgspec.convert(self, kind)
        except msgspec.ValidationError as error:
            path, why = wrong_field(error)
        except UnicodeEncodeError:
            self._problems.add(self._line, f"{self._what}: half a surrogate pair is no text")
            return None
        self.wrong(re.split(r"[.\[]", path)[0], why)
        return None


def yaml_table(text: str, what: str, problems: Problems) -> YamlTable | None:
    """The mapping that a file is; None, with the reason noted, if it is none."""
    if len(text.encode("utf-8", "replace")) > MOST_BYTES:
        problems.add(1, f"the file is larger than {MOST_BYTES} bytes")
        return None
    try:
        if not _is_within_bounds(text, problems):
            return None
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problems.add(1 if mark is None else mark.line + 1, f"{error.problem or error.context}")
        return None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        at = getattr(error, "position", None)
        line = 1 if at is None else text.count("\n", 0, at) + 1
        problems.add(line, str(error).splitlines()[0])
        return None
    if not isinstance(node, yaml.MappingNode):
        problems.add(1, f"{what}: a mapping is expected")
        return None
    return YamlTable(node, what, problems)


def _is_within_bounds(text: str, problems: Problems) -> bool:
    """Look at the file's events, which takes no recursion, before it is composed."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            problems.add(line, "aliases are not supported; write the value again")
            return False
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_DEPTH:
            problems.add(line, f"it is nested more than {MOST_DEPTH} times")
            return False
        if number > MOST_VALUES:
            problems.add(line, f"there are more than {MOST_VALUES} values")
            return False
    return True


def _plain(node: yaml.Node, name: str, problems: Problems) -> Any:
    if isinstance(node, yaml.MappingNode):
        return YamlTable(node, name, problems)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, name, problems) for item in node.value]
    if node.tag == _STRING:
        return node.value
    if node.tag in _NUMBERS:
        try:
            return whole(node.value)
        except ValueError:
            return math.nan
    return {"true": True, "false": False}.get(node.value) if node.tag == _BOOL else None


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
