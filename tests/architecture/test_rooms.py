"""Every folder is a room: not too deep, a sentence about it, no class twice; the kit of tests."""

from collections import defaultdict
from pathlib import Path

from tests.architecture.sources import facts, shown
from tests.kit.places import ROOT

PRODUCT = (
    "common", "cache_manager", "scheduler", "gpu_manager", "torch_shim", "gateway_ext", "gpufaas",
)  # fmt: skip
OUTSIDE = ("bench", "compat", "hunt", "research", "tests")
MOST_LEVELS = 3  # of folders below a package
# Programs of their own inside a package: what they call a thing may be what the package calls it.
PROGRAMS = ("gateway_ext/runtime", "gpu_manager/worker")
# A policy's class is `Policy` and a rule's is `Rule`: their files' names tell them apart.
NAMED_BY_THEIR_FILE = frozenset({"Policy", "Rule"})

MODULES = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_folder_lies_deeper_than_a_reader_follows() -> None:
    deep = {
        shown(path.parent) for path in MODULES if len(Path(shown(path)).parts) > MOST_LEVELS + 2
    }

    assert not deep


def test_every_folder_says_what_belongs_in_it() -> None:
    folders = {path.parent for path in MODULES}
    inits = {folder / "__init__.py" for folder in folders if (folder / "__init__.py").exists()}
    silent = {shown(init) for init in inits if not facts(init).docstring}

    assert not silent


def test_no_class_name_is_used_twice_in_a_program() -> None:
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in MODULES:
        for name in facts(path).classes:
            if not name.startswith("_"):
                places[_program(path), name].append(shown(path))
    repeated = {name: where for name, where in places.items() if len(where) > 1}

    assert not {
        name: where for name, where in repeated.items() if name[1] not in NAMED_BY_THEIR_FILE
    }


def test_what_tests_share_lies_in_the_kit_or_in_their_own_folder() -> None:
    strange = {
        f"{shown(path)} imports {module}"
        for folder in OUTSIDE
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in facts(path).imports
        if not _may_import(path, module)
    }

    assert not strange, "\n".join(sorted(strange))


def _program(path: Path) -> str:
    own = (program for program in PROGRAMS if shown(path).startswith(f"{program}/"))
    return next(own, Path(shown(path)).parts[0])


def _may_import(path: Path, module: str) -> bool:
    """Helpers of tests belong to `tests.kit`, or to the folder of those that need them."""
    if not module.startswith("tests.") or module.startswith("tests.kit"):
        return True
    own = ".".join(path.relative_to(ROOT).parent.parts)
    name = module.rpartition(".")[2]
    return module.startswith(f"{own}.") and not name.startswith("test_") and name != "conftest"
