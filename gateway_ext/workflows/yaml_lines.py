"""Reads YAML within bounds, and knows the line of every value; pure."""

from collections.abc import Iterator

import yaml

from common.numerals import natural

MOST_BYTES = 64 << 10
MOST_DEPTH = 8
MOST_VALUES = 4_000
MOST_PROBLEMS = 20

_STRING, _INT, _BOOL = (f"tag:yaml.org,2002:{name}" for name in ("str", "int", "bool"))


class Problems:
    """What is wrong with a file, by line."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, line: int, text: str) -> None:
        self._found.append((line, text))

    @property
    def text(self) -> str:
        """A line for each problem, in the order of the file."""
        problems = dict.fromkeys(sorted(self._found))
        lines = [f"line {line}: {text}" for line, text in problems]
        left = len(lines) - MOST_PROBLEMS
        return "\n".join(lines[:MOST_PROBLEMS] + ([f"and {left} more"] if left > 0 else []))


class YamlTable:
    """A mapping of a file. What is missing or wrong is noted, and read as None."""

    def __init__(self, node: yaml.MappingNode, what: str, problems: Problems) -> None:
        self.what = what
        self.line = _line(node)
        self._problems = problems
        self._values: dict[str, yaml.Node] = {}
        self._lines: dict[str, int] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if not name:
                problems.add(_line(key), f"{what}: a name is expected")
            elif name in self._values:
                problems.add(_line(key), f"{what}: {name[:80]} is given twice")
            else:
                self._values[name], self._lines[name] = value, _line(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def line_of(self, name: str) -> int:
        """The line of a key; of the table itself if the key is missing."""
        return self._lines.get(name, self.line)

    def wrong(self, name: str, text: str) -> None:
        self._problems.add(self.line_of(name), f"{self.what}: {name} {text}")

    def refuse(self, name: str, error: Exception) -> None:
        self._problems.add(self.line_of(name), f"{self.what}: {name}: {error}")

    def only(self, *names: str) -> None:
        """Note every other key."""
        for name in self._values:
            if name not in names:
                known_names = ", ".join(names)
                self._problems.add(
                    self._lines[name],
                    f"{self.what}: {name[:80]} is unknown; there are {known_names}",
                )

    def text(self, name: str) -> str | None:
        node = self._scalar(name, "a text")
        if node is None:
            return None
        if node.tag != _STRING:
            self.wrong(name, f'must be a text; write it as {name}: "{node.value[:40]}"')
            return None
        return str(node.value)

    def whole(self, name: str, least: int, most: int) -> int | None:
        node = self._scalar(name, "a number")
        if node is None:
            return None
        number = natural(node.value)
        if node.tag != _INT or number is None or not least <= number <= most:
            self.wrong(name, f"must be a whole number from {least} to {most}")
            return None
        return number

    def truth(self, name: str) -> bool | None:
        node = self._scalar(name, "true or false")
        if node is None:
            return None
        if node.tag != _BOOL or node.value not in {"true", "false"}:
            self.wrong(name, "must be true or false")
            return None
        return bool(node.value == "true")

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts; one text is a list too."""
        node = self._values.get(name)
        if node is None:
            return None
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        texts = [item.value for item in nodes if _is_text(item)]
        if len(texts) < len(nodes):
            self.wrong(name, "must be a list of texts")
            return None
        return tuple(texts)

    def table(self, name: str) -> "YamlTable | None":
        node = self._values.get(name)
        if node is None:
            return None
        if not isinstance(node, yaml.MappingNode):
            self.wrong(name, "must be a mapping")
            return None
        return YamlTable(node, name, self._problems)

    def _scalar(self, name: str, wanted: str) -> yaml.ScalarNode | None:
        node = self._values.get(name)
        if node is not None and not isinstance(node, yaml.ScalarNode):
            self.wrong(name, f"must be {wanted}")
            return None
        return node


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


def _is_text(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _STRING


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
