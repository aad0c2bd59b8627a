"""Which build of the pure modules a process uses, and why it uses none."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.compiled_modules import (
    MANIFEST,
    SUFFIX,
    CompiledBuild,
    CompiledFinder,
    digest,
    find_build,
)

SOURCE = "room/pure.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of one source."""
    source = tmp_path / "root" / SOURCE
    source.parent.mkdir(parents=True)
    source.write_text("ONE = 1\n", encoding="utf-8")
    return tmp_path / "root"


def built(root: Path, **otherwise: object) -> str:
    """A folder with the manifest of a build, as the switch names it."""
    folder = root.parent / "build"
    folder.mkdir()
    sources: Mapping[str, str] = {SOURCE: digest(root / SOURCE)}
    manifest = {"suffix": SUFFIX, "modules": ["room.pure"], "sources": sources, **otherwise}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return str(folder)


def test_build_is_used_when_it_was_made_of_these_sources(root: Path) -> None:
    folder = built(root)

    expected = {"room.pure": (Path(folder) / f"room.pure{SUFFIX}").resolve()}
    assert find_build(folder, root) == CompiledBuild(expected, "")


@pytest.mark.parametrize("switch", ["off", "OFF"])
def test_no_build_is_used_when_the_switch_says_off(root: Path, switch: str) -> None:
    assert find_build(switch, root) == CompiledBuild({}, "GPUFAAS_COMPILED=off")


def test_no_build_is_used_when_there_is_none(root: Path, tmp_path: Path) -> None:
    assert find_build(str(tmp_path / "nowhere"), root) == CompiledBuild({}, "not built")


def test_no_build_is_used_when_the_cache_that_a_link_names_was_emptied(
    root: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "emptied")

    assert find_build(str(link), root) == CompiledBuild({}, "not built")


def test_no_build_is_used_when_it_is_for_another_python(root: Path) -> None:
    folder = built(root, suffix=".cpython-39.so")

    assert find_build(folder, root).reason == "built for another Python (*.cpython-39.so)"


def test_no_build_is_used_when_a_source_has_changed(root: Path) -> None:
    folder = built(root)
    (root / SOURCE).write_text("ONE = 2\n", encoding="utf-8")

    assert find_build(folder, root) == CompiledBuild({}, f"{SOURCE} has changed since it was built")


def test_no_build_is_used_when_a_source_is_gone(root: Path) -> None:
    folder = built(root)
    (root / SOURCE).unlink()

    assert find_build(folder, root) == CompiledBuild({}, f"{SOURCE} has changed since it was built")


def test_finder_finds_the_extensions_of_its_build_and_nothing_else(tmp_path: Path) -> None:
    extension = tmp_path / f"room.pure{SUFFIX}"
    finder = CompiledFinder(CompiledBuild({"room.pure": extension}, ""))

    found = finder.find_spec("room.pure", None)
    assert found is not None
    assert found.origin == str(extension)
    assert finder.find_spec("room.other", None) is None
