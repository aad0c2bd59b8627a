"""What the tests here ask of each source of the project: all of it is found in one go."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

from tests.kit.places import ROOT


class SourceFacts(NamedTuple):
    """One module."""

    docstring: str
    lines: int
    functions: tuple[tuple[str, int], ...]  # with their lengths in lines
    classes: tuple[str, ...]  # at the top
    imports: frozenset[str]  # absolute ones, by module


@functools.cache
def facts(path: Path) -> SourceFacts:
    """What is in this file; its tree is not kept, as all of them are too many objects."""
    text = path.read_text(encoding="utf-8")
    module = ast.parse(text)
    functions, imports = list[tuple[str, int]](), set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imports.add(str(node.module))
        elif isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
    return SourceFacts(
        ast.get_docstring(module) or "",
        len(text.splitlines()),
        tuple(functions),
        tuple(node.name for node in module.body if isinstance(node, ast.ClassDef)),
        frozenset(imports),
    )


def shown(path: Path) -> str:
    """The path as the checkout has it."""
    return str(path.relative_to(ROOT))
