"""Every folder is a room: few files in it, a sentence about it, no name twice; the kit of tests."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.architecture.sources import facts, shown
from tests.kit.places import ROOT

PRODUCT = (
    "common", "cache_manager", "scheduler", "gpu_manager", "torch_shim", "gateway_ext", "gpufaas",
)  # fmt: skip
OUTSIDE = ("bench", "compat", "hunt", "research", "tests")
MOST_FILES = 15
# A file below it is named as its subcommand is.
COMMANDS = "gpufaas/commands"
# The same in every folder: what it shows to others, what can go wrong, what a person can choose.
CONVENTIONS = frozenset(
    {"__init__.py", "__main__.py", "api.py", "errors.py", "settings.py", "sitecustomize.py"}
)
# A policy's class is `Policy` and a rule's is `Rule`: their files' names tell them apart.
NAMED_BY_THEIR_FILE = frozenset({"Policy", "Rule"})

MODULES = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    files: dict[Path, int] = defaultdict(int)
    for path in MODULES:
        files[path.parent] += 1
    full = {f"{shown(folder)}: {count}" for folder, count in files.items() if count > MOST_FILES}

    assert not full


def test_every_folder_says_what_belongs_in_it() -> None:
    folders = {path.parent for path in MODULES}
    inits = {folder / "__init__.py" for folder in folders if (folder / "__init__.py").exists()}
    silent = {shown(init) for init in inits if not facts(init).docstring}

    assert not silent


def test_no_file_name_is_used_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        if path.name not in CONVENTIONS and not shown(path).startswith(COMMANDS):
            places[path.name].append(shown(path))

    assert not _repeated(places)


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for name in facts(path).classes:
            if not name.startswith("_"):
                places[name].append(shown(path))

    assert not _repeated(places).keys() - NAMED_BY_THEIR_FILE


def test_what_tests_share_lies_in_the_kit_or_in_their_own_folder() -> None:
    strange = {
        f"{shown(path)} imports {module}"
        for folder in OUTSIDE
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in facts(path).imports
        if not _may_import(path, module)
    }

    assert not strange, "\n".join(sorted(strange))


def _may_import(path: Path, module: str) -> bool:
    """Helpers of tests belong to `tests.kit`, or to the folder of those that need them."""
    if not module.startswith("tests.") or module.startswith("tests.kit"):
        return True
    own = ".".join(path.relative_to(ROOT).parent.parts)
    name = module.rpartition(".")[2]
    return module.startswith(f"{own}.") and not name.startswith("test_") and name != "conftest"


def _repeated(places: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: where for name, where in places.items() if len(where) > 1}
