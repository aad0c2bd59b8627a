"""Takes features out of a copy of this checkout, each alone, and runs all other tests there.

    python -m hunt.leave                          # every feature, with all tests of `make test`
    python -m hunt.leave workflows page           # some of them
    python -m hunt.leave page --tests tests/unit/gateway_ext    # a quick look; --tests alone: none

The tests run in an unchanged copy first: what fails there too is no fault of a feature. A feature
leaves if each of its roots names it by one import and one element or statement, nothing else of
the product imports it, and all tests pass that neither import nor name it. Tests that compare
documents and lists with the whole checkout do not run: both are edited when one leaves.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from deploy.generated_blocks import with_blocks
from hunt.features import FEATURES, Feature
from tests.kit.places import ROOT

PRODUCT = (
    "common", "cache_manager", "scheduler", "gpu_manager", "torch_shim", "gateway_ext", "gpufaas",
)  # fmt: skip
_OF_THE_WHOLE = (
    "tests/architecture",
    "tests/unit/deploy",
    "hunt/parsers/test_parser_registry.py",
    "hunt/test_leave.py",
    # These list the policies.
    "tests/scenarios/test_scenarios.py::test_scenario_plays_as_written[policy_changes_live]",
    "tests/unit/gpufaas/options/test_settings_page.py"
    "::test_settings_page_lists_the_parameters_of_policies",
)
_MOST_SHOWN = 20
_TABLE_HELP = "run no test: print what is in the way, and write docs/architecture.md's table"
_NOT_STARTED = "pytest did not start"
_PAGE = ROOT / "docs" / "architecture.md"
_A_ROW = 6


class Cut(NamedTuple):
    """What a root loses."""

    path: str
    imports: int
    elements: int


class Left(NamedTuple):
    """A tree without a feature; `stops` are the places that keep it from leaving."""

    lines: int
    files: int
    cuts: Sequence[Cut]
    stops: Sequence[str]
    tests_gone: Sequence[str]
    deselected: Sequence[str]


class TestRun(NamedTuple):
    """What the tests of a tree said; `known` failed in the unchanged tree too."""

    ran: int = 0
    failed: Sequence[str] = ()
    known: Sequence[str] = ()


def main(arguments: Sequence[str]) -> int:
    """0 if all of the features leave, or the table is written."""
    parser = argparse.ArgumentParser(
        prog="hunt.leave", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="(all)")
    parser.add_argument("--tests", nargs="*", metavar="PATH", help="only these tests, or none")
    parser.add_argument("--workers", type=int, default=(os.cpu_count() or 1) + 2)
    parser.add_argument("--table", action="store_true", help=_TABLE_HELP)
    parser.add_argument("--keep", action="store_true", help="keep the copies, in /tmp/leave-*")
    asked = parser.parse_args(arguments)
    known = {feature.name: feature for feature in FEATURES}
    unknown = [name for name in asked.features if name not in known]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}: one of {', '.join(known)} is expected")
    if asked.table:
        asked.features, asked.tests = [], []
    before = _before(asked.tests, asked.workers)
    rows, cells, stay = [], [], 0
    for feature in [known[name] for name in asked.features] or FEATURES:
        with without_feature(feature, keep=asked.keep) as (tree, left):
            tests = TestRun()
            if not left.stops:
                tests = run_tests(tree, left.deselected, asked.tests, asked.workers, before)
        stay += bool(left.stops or tests.failed)
        rows.append(_row(feature, left, tests))
        cells.append(f"| {feature.name} | {left.lines:,}{' (stays)' if left.stops else ''} ")
        print("\n".join(_told(feature, left, tests)), flush=True)
    print("\n" + "\n".join([_HEAD, *rows]))
    if asked.table:
        page = _PAGE.read_text(encoding="utf-8")
        _PAGE.write_text(with_blocks(page, {"features": _table(cells)}), encoding="utf-8")
    return 1 if stay and not asked.table else 0


def _table(cells: Sequence[str]) -> str:
    """What each feature costs, as the architecture's page has it, and whether it stays today."""
    rows = ["".join(cells[first : first + _A_ROW]) + "|" for first in range(0, len(cells), _A_ROW)]
    return "\n".join(["| feature | lines " * _A_ROW + "|", "| --- | ---: " * _A_ROW + "|", *rows])


def _before(only: Sequence[str] | None, workers: int) -> Collection[str]:
    """What fails in an unchanged copy."""
    if only == []:
        return ()
    with copied() as tree:
        return set(run_tests(tree, (), only, workers).failed) - {_NOT_STARTED}


@contextmanager
def without_feature(feature: Feature, *, keep: bool = False) -> Iterator[tuple[Path, Left]]:
    """A copy of the checkout without a feature, for as long as the context lasts."""
    with copied(keep=keep) as tree:
        yield tree, take_out(tree, feature)


@contextmanager
def copied(*, keep: bool = False) -> Iterator[Path]:
    """A copy of what git tracks, as it is in the checkout now."""
    tree = Path(tempfile.mkdtemp(prefix="leave-"))
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            source, target = ROOT / name, tree / name
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        (tree / ".venv").symlink_to(ROOT / ".venv")
        yield tree
    finally:
        if not keep:
            shutil.rmtree(tree)


def take_out(tree: Path, feature: Feature) -> Left:
    """Delete the feature's folders, its lines in its roots, and the tests that import it."""
    files = [path for name in feature.product for path in _below(tree, name)]
    python = [path for path in files if path.suffix == ".py"]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in python)
    own = [path for name in feature.tests for path in _below(tree, name)]
    gone = {_module(tree, path) for path in (*python, *own)}
    for path in files:
        path.unlink()
    cuts, stops = [], [] if python else ["it has no folder any more"]
    for path in sorted({*_python(tree, PRODUCT), *(tree / root for root in feature.roots)}):
        text, cut, why = without(path.read_text(encoding="utf-8"), gone, feature.elements)
        where = str(path.relative_to(tree))
        is_root = where in feature.roots
        if why or (cut.imports and not is_root):
            stops += [f"{where}:{line}" for line in why] or [f"{where} imports it"]
        elif is_root and (cut.imports or cut.elements):
            path.write_text(text, encoding="utf-8")
            cuts.append(cut._replace(path=where))
    tests_gone = list(_delete_tests(tree, set(own), gone))
    return Left(lines, len(python), cuts, stops, tests_gone, list(_named_tests(tree, feature)))


# -- the product ---------------------------------------------------------------------------------


def without(
    text: str, gone: Collection[str], elements: Collection[str] = ()
) -> tuple[str, Cut, Sequence[str]]:
    """A module without the imports of these modules, and without the one line that uses them.

    The third value has the lines that would have to go too, if there are any. `elements` are
    strings that leave the tuples that have them.
    """
    if not elements and not any(_mentions(text, module) for module in gone):
        return text, Cut("", 0, 0), ()
    root = ast.parse(text)
    imports = [
        node
        for node in ast.walk(root)
        if isinstance(node, ast.Import | ast.ImportFrom) and _imported(node, gone)
    ]
    names = {name for node in imports for name in _imported(node, gone)}
    parents = {child: node for node in ast.walk(root) for child in ast.iter_child_nodes(node)}
    uses: list[ast.expr] = [
        node for node in ast.walk(root) if isinstance(node, ast.Name) and node.id in names
    ]
    uses += [
        node
        for node in ast.walk(root)
        if isinstance(node, ast.Constant) and node.value in elements
        if isinstance(parents[node], ast.Tuple)
    ]
    edits = [_edit_of(text, use, parents) for use in uses]
    cut = Cut("", len(imports), len(uses))
    if len(imports) > 1 or len(uses) > 1 or None in edits:
        lines = sorted({node.lineno for node in (*imports, *uses)})
        return text, cut, [f"{number}: {_line(text, number)}" for number in lines]
    edits += [_import_edit(node, gone) for node in imports]
    return _edited(text, [edit for edit in edits if edit is not None]), cut, ()


class _Edit(NamedTuple):
    """What stands in place of a part of a text."""

    begin: tuple[int, int]  # line from 1, column in bytes
    end: tuple[int, int]
    text: str


def _mentions(text: str, module: str) -> bool:
    package, _, last = module.rpartition(".")
    return module in text or (f"from {package} import" in text and last in text)


def _imported(node: ast.Import | ast.ImportFrom, gone: Collection[str]) -> Mapping[str, ast.alias]:
    """What an import takes from these modules, by the names that it gives."""
    taken = {}
    for alias in node.names:
        if isinstance(node, ast.Import):
            modules = {alias.name}
        else:
            modules = {str(node.module), f"{node.module}.{alias.name}"}
        if modules & set(gone):
            taken[alias.asname or alias.name.partition(".")[0]] = alias
    return taken


def _import_edit(node: ast.Import | ast.ImportFrom, gone: Collection[str]) -> _Edit:
    taken = _imported(node, gone).values()
    node.names = [alias for alias in node.names if alias not in taken]
    return _replaced(node, ast.unparse(node) if node.names else "pass")


def _edit_of(text: str, use: ast.expr, parents: Mapping[ast.AST, ast.AST]) -> _Edit | None:
    """How the element or the statement goes that uses a name; None if it is neither."""
    node: ast.AST = use
    while node in parents:
        above = parents[node]
        if isinstance(above, ast.Tuple | ast.List | ast.Set) and _is_display(text, above):
            above.elts = [element for element in above.elts if element is not node]
            return _replaced(above, ast.unparse(above))
        if isinstance(above, ast.Expr):
            return _replaced(above, "pass")
        if isinstance(above, ast.stmt):
            return None
        node = above
    return None


def _is_display(text: str, node: ast.Tuple | ast.List | ast.Set) -> bool:
    return (ast.get_source_segment(text, node) or "")[:1] in ("(", "[", "{")


def _line(text: str, number: int) -> str:
    return text.splitlines()[number - 1].strip()


def _replaced(node: ast.stmt | ast.expr, text: str) -> _Edit:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return _Edit((node.lineno, node.col_offset), end, text)


def _edited(text: str, edits: Sequence[_Edit]) -> str:
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for edit in sorted(edits, reverse=True):
        (first, begin), (last, end) = edit.begin, edit.end
        joined = lines[first - 1][:begin] + edit.text.encode() + lines[last - 1][end:]
        lines[first - 1 : last] = [joined]
    return b"".join(lines).decode()


# -- the tests -----------------------------------------------------------------------------------


def _delete_tests(tree: Path, own: set[Path], gone: set[str]) -> Iterator[str]:
    """Delete the feature's own tests, and what imports what is gone, directly or through others."""
    outside = [path for path in _python(tree, ()) if path.is_relative_to(tree)]
    imports = {path: _imports_of(path) for path in outside}
    for path in own.difference(imports):  # a scenario
        path.unlink()
    away = set(gone)
    while True:
        more = {path for path in imports if path in own or imports[path] & away}
        folders = {path.parent for path in more if path.name == "conftest.py"}
        more |= {path for path in imports if folders & set(path.parents)}
        if not more:
            return
        for path in sorted(more):
            del imports[path]
            path.unlink()
            away.add(_module(tree, path))
            yield str(path.relative_to(tree))


def _named_tests(tree: Path, feature: Feature) -> Iterator[str]:
    """Tests that name the feature; a file goes if what its tests share names it."""
    word = re.compile(feature.words, re.IGNORECASE)
    for path in _python(tree, ()):
        text, where = path.read_text(encoding="utf-8"), str(path.relative_to(tree))
        if not path.name.startswith("test_") or not word.search(f"{where}\n{text}"):
            continue
        if word.search(where):
            yield where
            continue
        for name, lines in _parts(text):
            if word.search(lines):
                yield f"{where}::{name}" if name else where


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """A module's tests with their lines; other statements have no name, its docstring is none."""
    lines = text.splitlines()
    for number, node in enumerate(ast.parse(text).body):
        if number == 0 and isinstance(node, ast.Expr):
            continue
        name, first = "", node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name if node.name.lower().startswith("test") else ""
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
        yield name, "\n".join(lines[first - 1 : node.end_lineno])


def _imports_of(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def run_tests(
    tree: Path,
    deselected: Sequence[str],
    only: Sequence[str] | None,
    workers: int,
    before: Collection[str] = (),
) -> TestRun:
    """Run all tests, or `only` some, but those that were named; `before` are known to fail."""
    if only == []:
        return TestRun()
    report = tree / "out" / "leave.xml"
    words = [f"--deselect={name}" for name in (*deselected, *_OF_THE_WHOLE)]
    words += [name for name in only or () if (tree / name).exists()]
    pytest = [sys.executable, "-m", "pytest", "-q", f"--numprocesses={workers}"]
    subprocess.run(
        ["env", f"PYTHONPATH={tree}", *pytest, f"--junitxml={report}", *words],
        cwd=tree,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if not report.exists():
        return TestRun(0, [_NOT_STARTED])
    cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in wrong]
    known = [test for test in failed if test in before]
    return TestRun(len(cases), [test for test in failed if test not in before], known)


# -- what is printed -----------------------------------------------------------------------------

_HEAD = (
    f"{'feature':18}{'lines':>7}{'files':>7}{'roots':>7}{'in the way':>12}{'ran':>7}{'failed':>8}"
)


def _row(feature: Feature, left: Left, tests: TestRun) -> str:
    counts = f"{left.lines:7}{left.files:7}{len(left.cuts):7}{len(left.stops):12}"
    return f"{feature.name:18}{counts}{tests.ran:7}{len(tests.failed):8}"


def _told(feature: Feature, left: Left, tests: TestRun) -> Iterator[str]:
    stays = left.stops or tests.failed
    yield f"{feature.name} {'stays' if stays else 'leaves'}: {left.lines} lines, " + ", ".join(
        f"{cut.path} ({cut.imports} import, {cut.elements} element)" for cut in left.cuts
    )
    gone, named = len(left.tests_gone), len(left.deselected)
    yield f"  {gone} modules of tests import it, {named} tests name it"
    for words, places in (
        ("in the way", left.stops),
        ("failed", tests.failed),
        ("fails in the unchanged tree too", tests.known),
    ):
        yield from (f"  {words}: {place}" for place in places[:_MOST_SHOWN])
        if len(places) > _MOST_SHOWN:
            yield f"  {words}: {len(places) - _MOST_SHOWN} more"


# -- files ---------------------------------------------------------------------------------------


def _below(tree: Path, name: str) -> list[Path]:
    """The files of a folder, or a module, with its suffix or without."""
    named = [path for path in (tree / name, tree / f"{name}.py") if path.is_file()]
    return named or [path for path in sorted((tree / name).rglob("*")) if path.is_file()]


def _python(tree: Path, folders: Sequence[str]) -> list[Path]:
    """The modules in these folders; without folders, those outside the product."""
    if folders:
        return [path for folder in folders for path in sorted((tree / folder).rglob("*.py"))]
    others = [path for path in sorted(tree.iterdir()) if path.name not in (*PRODUCT, ".venv")]
    return [
        path
        for other in others
        for path in ([other] if other.suffix == ".py" else sorted(other.rglob("*.py")))
    ]


def _module(tree: Path, path: Path) -> str:
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
