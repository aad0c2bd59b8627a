"""Reads a script and the modules of its own project that it imports."""

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

from gpufaas.errors import CommandError

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def read_project(script: Path) -> dict[Path, ast.Module]:
    """A program's files, the script first; files outside of the script's folder are left out."""
    root = script.resolve().parent
    found: dict[Path, ast.Module] = {}
    waiting = [script.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = _read(path)
            waiting += sorted(_imported(path, found[path], root), reverse=True)
    return found


def _read(path: Path) -> ast.Module:
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read(), str(path))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise CommandError(f"{path}{line}: this is no Python: {error}") from error


def _imported(path: Path, tree: ast.Module, root: Path) -> set[Path]:
    """The project's files that a file imports."""
    found: set[Path] = set()
    for node in ast.walk(tree):
        for folder, module in _modules(node, path, root):
            found.update(_files(folder, module.split(".") if module else []))
    return {file for file in found if not _INSTALLED.intersection(file.relative_to(root).parts)}


def _modules(node: ast.AST, path: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """A statement's imported modules, each with the folder of its search."""
    if isinstance(node, ast.Import):
        yield from ((root, name.name) for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = path.parents
        if node.level > len(above):
            return
        folder = above[node.level - 1] if node.level else root
        if folder == root or root in folder.parents:
            before = f"{node.module}." if node.module else ""
            yield from ((folder, f"{before}{name.name}") for name in node.names)


def _files(folder: Path, parts: list[str]) -> Iterator[Path]:
    """The existing files that an import runs."""
    for part in parts:
        module = folder / f"{part}.py"
        folder /= part
        package = folder / "__init__.py"
        if package.is_file():
            yield package
        elif module.is_file():
            yield module
            return
