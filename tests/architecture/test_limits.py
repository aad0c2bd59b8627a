"""The limits that style.md sets and no linter checks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache_manager", "scheduler", "gpu_manager", "torch_shim", "gateway_ext", "gpufaas")
FOLDERS = (*PACKAGES, "bench", "tests", "functions")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"))] + [
    # Debian has a package of the first one's name.
    ".".join(parts)
    for parts in (("docker", "io/"), ("ghcr", "io"), ("quay", "io"))
]
TEXT = {".py", ".sh", ".tpl", ".json", ".toml", ".txt", ".md", ".yml", ".yaml", ".cfg", ".csv", ""}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


@each_file
def test_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@each_file
def test_function_has_at_most_60_lines(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    long = {f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > 60}
    assert not long


@each_file
def test_module_starts_with_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "say in the first line what the module holds"


def test_no_file_names_a_registry_host() -> None:
    named = {
        f"{path.relative_to(ROOT)}: {host}"
        for path in _tracked()
        for host in REGISTRIES
        if host in path.read_text(encoding="utf-8", errors="ignore")
    }
    assert not named


def test_limits_are_checked_on_every_package() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert {"cache_manager", "scheduler", "tests"} <= found


def _tracked() -> Iterator[Path]:
    """Our own text files: no environment, cache or build output."""
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.suffix in TEXT:
            yield path
        elif path.name in FOLDERS or path.name in {"deploy", "docs", "template", ".ci"}:
            yield from (file for file in path.rglob("*") if file.is_file() and _is_text(file))


def _is_text(path: Path) -> bool:
    return path.suffix in TEXT and "__pycache__" not in path.parts
