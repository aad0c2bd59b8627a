"""The limits that style.md sets and no linter checks."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.kit.places import ROOT

PACKAGES = (
    "common",
    "cache_manager",
    "scheduler",
    "gpu_manager",
    "torch_shim",
    "gateway_ext",
    "gpufaas",
)
FOLDERS = (*PACKAGES, "bench", "compat", "hunt", "tests", "functions")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"))] + [
    # Debian has a package of the first one's name.
    ".".join(parts)
    for parts in (("docker", "io/"), ("ghcr", "io"), ("quay", "io"))
]
TEXT = {".py", ".sh", ".tpl", ".json", ".toml", ".txt", ".md", ".yml", ".yaml", ".cfg", ".csv", ""}
_LINES, _FUNCTION_LINES = 700, 60


def test_files_and_functions_have_no_more_lines_than_allowed() -> None:
    long = [
        *(f"{path}: {lines} lines" for path, lines in _lengths() if lines > _LINES),
        *(f"{name}: {lines} lines" for name, lines in _functions() if lines > _FUNCTION_LINES),
    ]
    assert not long, "\n".join(long)


def test_every_module_starts_with_a_docstring() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in FILES
        if not path.read_text(encoding="utf-8").startswith('"""')
    ]
    assert not bare, "\n".join(bare)


def test_no_file_names_a_registry_host() -> None:
    named = {
        f"{path.relative_to(ROOT)}: {host}"
        for path in _tracked()
        for host in REGISTRIES
        if host in path.read_text(encoding="utf-8", errors="ignore")
    }
    assert not named, "\n".join(sorted(named))


def test_limits_are_checked_on_every_folder() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FOLDERS)


def _lengths() -> Iterator[tuple[Path, int]]:
    for path in FILES:
        yield path.relative_to(ROOT), len(path.read_text(encoding="utf-8").splitlines())


def _functions() -> Iterator[tuple[str, int]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT)}: {node.name}"
                yield name, (node.end_lineno or 0) - node.lineno + 1


def _tracked() -> Iterator[Path]:
    """Our own text files: no environment, cache or build output."""
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.suffix in TEXT:
            yield path
        elif path.name in FOLDERS or path.name in {"deploy", "docs", "template", ".ci"}:
            yield from (file for file in path.rglob("*") if file.is_file() and _is_text(file))


def _is_text(path: Path) -> bool:
    return path.suffix in TEXT and "__pycache__" not in path.parts
