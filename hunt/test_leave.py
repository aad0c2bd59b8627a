"""Taking a feature out of a toy tree: its folder, its line, its tests; and what keeps one in."""

from pathlib import Path

import pytest

from hunt.features import FEATURES, Feature
from hunt.leave import run_tests, take_out, without
from tests.kit.places import ROOT

ROOT_MODULE = '''"""The root."""

from common.core import run
from common.page.parts import page

FEATURES = (run, page)
COMMANDS = (*("up", "page"), "down")
'''
PAGE = Feature("page", ("common/page",), ("common/root.py",), "page", ("tests/page",), ("page",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product with a core, a feature and their root; tests of each, with a helper."""
    files = {
        "common/__init__.py": "",
        "common/core.py": "def run() -> None: ...\n",
        "common/page/__init__.py": "",
        "common/page/parts.py": "def page() -> None: ...\n",
        "common/root.py": ROOT_MODULE.replace("COMMANDS = ", "").rpartition("(*")[0],
        "tests/core/test_core.py": "from common.core import run\n\n\ndef test_run() -> None: ...\n",
        "tests/core/test_named.py": "def test_one(): ...\n\n\ndef test_page(): ...\n",
        "tests/core/test_page_size.py": "def test_it() -> None: ...\n",
        "tests/core/test_through.py": "from tests.kit.world import World\n",
        "tests/kit/world.py": "from common.page import parts\n",
        "tests/page/test_page.py": "def test_it() -> None: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_feature_leaves_with_its_folder_its_line_and_its_tests(tree: Path) -> None:
    left = take_out(tree, PAGE)
    assert (left.lines, left.files, left.stops) == (1, 2, [])
    assert [(cut.path, cut.imports, cut.elements) for cut in left.cuts] == [
        ("common/root.py", 1, 1)
    ]
    assert not list((tree / "common/page").glob("*.py"))
    text = (tree / "common/root.py").read_text()
    assert "FEATURES = (run,)" in text
    assert "common.page" not in text
    assert left.tests_gone == [
        "tests/kit/world.py",
        "tests/page/test_page.py",
        "tests/core/test_through.py",
    ]
    assert left.deselected == [
        "tests/core/test_named.py::test_page",
        "tests/core/test_page_size.py",
    ]


def test_feature_stays_while_something_else_imports_it(tree: Path) -> None:
    core = tree / "common/core.py"
    core.write_text("from common.page.parts import page\n\npage()\n")
    assert take_out(tree, PAGE).stops == ["common/core.py imports it"]


def test_root_outside_the_product_loses_its_line_too(tree: Path) -> None:
    (tree / "hunt").mkdir()
    (tree / "hunt/root.py").write_text(
        "from tests.page.stand_ins import STAND_INS\n\nX = (*STAND_INS,)\n"
    )
    (tree / "tests/page/stand_ins.py").write_text("from common.page import parts\n")
    roots = ("common/root.py", "hunt/root.py")
    left = take_out(tree, PAGE._replace(roots=roots))
    assert [cut.path for cut in left.cuts] == list(roots)
    assert "X = ()" in (tree / "hunt/root.py").read_text()


def test_feature_stays_while_its_root_needs_more_than_a_line() -> None:
    text = ROOT_MODULE + "\npage()\n"
    same, cut, places = without(text, {"common.page.parts"})
    assert (same, cut.imports, cut.elements) == (text, 1, 2)
    assert places == [
        "4: from common.page.parts import page",
        "6: FEATURES = (run, page)",
        "9: page()",
    ]


@pytest.mark.parametrize(
    ("used", "left"),
    [
        ("x = [page, 1]", "x = [1]"),
        ("x = {page}", "x = {*()}"),
        ("x = (1, *page, 2)", "x = (1, 2)"),
        ("register(page)", "pass"),
        ("if True:\n    await_it(a, (page,))", "if True:\n    await_it(a, ())"),
    ],
)
def test_element_or_statement_goes(used: str, left: str) -> None:
    text, _, places = without(f"from a.b import page, other\n{used}\n", {"a.b.page"})
    assert (text, places) == (f"from a.b import other\n{left}\n", ())


@pytest.mark.parametrize("used", ["x = page", "def f(x: page) -> None: ...", "x = page or 1"])
def test_other_uses_are_in_the_way(used: str) -> None:
    assert without(f"from a.b import page\n{used}\n", {"a.b"})[2]


def test_command_leaves_the_tuple_that_names_it() -> None:
    text, cut, places = without(ROOT_MODULE, (), {"page"})
    assert "COMMANDS = (*('up',), \"down\")" in text
    assert (cut.elements, places) == (1, ())


def test_what_fails_in_the_unchanged_tree_too_is_no_fault_of_a_feature(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_old(): assert 0\n\n\ndef test_new(): assert 0\n\n\ndef test_one(): ...\n"
    )
    tests = run_tests(tmp_path, ["test_it.py::test_one"], None, 0, {"test_it::test_old"})
    assert tests == (2, ["test_it::test_new"], ["test_it::test_old"])


def test_every_feature_has_its_line_in_the_table_of_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [feature.name for feature in FEATURES if f"| {feature.name} |" not in page]
