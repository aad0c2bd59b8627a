"""The documents name files, folders, modules, tests and make targets that exist."""

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.kit.places import ROOT

MADE_LATER = "deploy/compose/secrets"  # by deploy/compose/secrets.sh, and never tracked
# Records of decisions and results are history: they name what there was.
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
NOT_OURS = frozenset({"out", "build", "dist", "shared"})
FOLDERS = frozenset(
    path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")
).difference(NOT_OURS)

FILES = frozenset(path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)")
_PATH = re.compile(r"[\w.{},*-]+(?:/[\w.{},*-]+)*/?")
_MODULE = re.compile(r"python -m ([\w.]+)")
_TARGET = re.compile(r"make ([a-z-]+)")
_FILE = re.compile(r"\w+\.py")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_BRACES = re.compile(r"\{([^{}]*)\}")


def test_documents_name_nothing_that_does_not_exist() -> None:
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path in DOCUMENTS for name in _missing(path)]

    assert not wrong, "\n".join(wrong)


def test_architecture_fits_on_one_page() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 120


def _missing(document: Path) -> Iterator[str]:
    text = document.read_text(encoding="utf-8")
    for code in _CODE.findall(text):
        if _FILE.fullmatch(code) and code not in FILES:
            yield code
        if not _PATH.fullmatch(code) or "/" not in code or code.startswith(MADE_LATER):
            continue
        if code.partition("/")[0] in FOLDERS:
            yield from (each for each in _expanded(code) if not list(ROOT.glob(each.rstrip("/"))))
    for file, test in _TEST.findall(text):
        if not _has_test(ROOT / file, test):
            yield f"{file}::{test}"
    for link in _LINK.findall(text):
        if "://" not in link and not (document.parent / link).exists():
            yield link
    yield from (each for each in _MODULE.findall(text) if _is_ours(each) and not _runs(each))
    yield from (
        f"make {each}"
        for each in _TARGET.findall("\n".join(_CODE.findall(text)))
        if each not in _targets()
    )


def _expanded(path: str) -> list[str]:
    """Every path that braces stand for: `a/{b,c}` is `a/b` and `a/c`."""
    found = _BRACES.search(path)
    if found is None:
        return [path]
    parts = found[1].split(",")
    return [
        each
        for part in parts
        for each in _expanded(path[: found.start()] + part + path[found.end() :])
    ]


def _has_test(file: Path, test: str) -> bool:
    return file.is_file() and f"def {test}(" in file.read_text(encoding="utf-8")


def _is_ours(module: str) -> bool:
    return (ROOT / module.partition(".")[0]).is_dir()


def _runs(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and (
        spec.submodule_search_locations is None or find_spec(f"{module}.__main__") is not None
    )


def _targets() -> frozenset[str]:
    names = subprocess.run(
        ["make", "--print-data-base", "--question", "--no-builtin-rules", "help"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return frozenset(re.findall(r"^([a-z-]+):", names, re.MULTILINE))
