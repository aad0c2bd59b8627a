"""The limits that style.md sets and no linter checks."""

from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import facts, shown
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
FOLDERS = (*PACKAGES, "bench", "compat", "hunt", "research", "tests", "functions")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"))] + [
    # Debian has a package of the first one's name.
    ".".join(parts)
    for parts in (("docker", "io/"), ("ghcr", "io"), ("quay", "io"))
]
TEXT = {".py", ".sh", ".tpl", ".json", ".toml", ".txt", ".md", ".yml", ".yaml", ".cfg", ".csv", ""}
_LINES, _FUNCTION_LINES = 700, 60


def test_files_and_functions_have_no_more_lines_than_allowed() -> None:
    long = []
    for path in FILES:
        found = facts(path)
        if found.lines > _LINES:
            long.append(f"{shown(path)}: {found.lines} lines")
        for name, lines in found.functions:
            if lines > _FUNCTION_LINES:
                long.append(f"{shown(path)}: {name}: {lines} lines")
    assert not long, "\n".join(long)


def test_every_module_starts_with_a_docstring() -> None:
    bare = [shown(path) for path in FILES if not facts(path).docstring]
    assert not bare, "\n".join(bare)


def test_no_file_names_a_registry_host() -> None:
    named = {
        f"{shown(path)}: {host}"
        for path in _tracked()
        for host in REGISTRIES
        if host in path.read_text(encoding="utf-8", errors="ignore")
    }
    assert not named, "\n".join(sorted(named))


def test_limits_are_checked_on_every_folder() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FOLDERS)


def _tracked() -> Iterator[Path]:
    """Our own text files: no environment, cache or build output."""
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.suffix in TEXT:
            yield path
        elif path.name in FOLDERS or path.name in {"deploy", "docs", "template", ".ci"}:
            yield from (file for file in path.rglob("*") if file.is_file() and _is_text(file))


def _is_text(path: Path) -> bool:
    return path.suffix in TEXT and "__pycache__" not in path.parts
