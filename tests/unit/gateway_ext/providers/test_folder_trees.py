"""Trees that others made: removed, closed and measured without leaving them."""

import os
import resource
import subprocess
from pathlib import Path

import pytest

from gateway_ext.providers import disk
from gateway_ext.providers.disk import TreeRefused

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of two users")
MALLORY = 61_990


def deep(folder: Path, levels: int) -> None:
    """Nest folders deeper than a path may be long."""
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_tree_is_removed_when_it_is_deeper_than_python_calls_and_open_files(tmp_path: Path) -> None:
    deep(tmp_path / "tree", 5_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())  # of tests before
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 200), hard))
    try:
        disk.remove(tmp_path / "tree")
        assert list(tmp_path.iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        subprocess.run(["rm", "-rf", tmp_path / "tree"], check=True)  # pytest itself could not


def test_what_links_lead_to_stays_when_a_tree_is_removed(tmp_path: Path) -> None:
    kept, tree = tmp_path / "kept", tmp_path / "tree"
    kept.mkdir()
    (kept / "file").write_text("mine")
    (tree / "below").mkdir(parents=True)
    for where in (tree / "link", tree / "below" / "link", tmp_path / "link"):
        where.symlink_to(kept)
    (tree / "below").chmod(0o500)
    disk.remove(tmp_path / "link")
    disk.remove(tree)
    disk.remove(tmp_path / "never there")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").read_text() == "mine"


def test_walk_ends_when_a_tree_is_too_deep_or_has_too_much(tmp_path: Path) -> None:
    deep(tmp_path / "deep", 200)
    with pytest.raises(TreeRefused, match="levels"):
        disk.size_bytes(tmp_path / "deep")
    with disk.opened(tmp_path) as top, pytest.raises(TreeRefused, match="more than 3 files"):
        list(disk.entries(top, most=3))


@as_root
def test_closed_tree_is_roots_and_no_link_was_followed(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.write_text("secret")
    outside.chmod(0o600)
    (tree / "bin").mkdir(parents=True)
    (tree / "link").symlink_to(outside)
    (tree / "bin" / "run").touch(0o777)
    (tree / "bin" / "read").touch(0o666)
    os.link(tree / "bin" / "read", tree / "again")
    for path in (tree, *tree.rglob("*")):
        os.chown(path, MALLORY, MALLORY, follow_symlinks=False)
    disk.close_for_others(tree, made_by=MALLORY)
    assert {path.lstat().st_uid for path in (tree, *tree.rglob("*"))} == {0}
    modes = {p.name: p.lstat().st_mode & 0o7777 for p in tree.rglob("*") if not p.is_symlink()}
    assert modes == {"bin": 0o755, "run": 0o755, "read": 0o644, "again": 0o644}
    assert outside.stat().st_mode & 0o7777 == 0o600


@as_root
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_tree_is_not_closed_when_it_has_anothers_file_or_none(tmp_path: Path, kind: str) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.touch(0o600)
    tree.mkdir()
    if kind == "file":
        os.link(outside, tree / "mine")  # as systems without protected_hardlinks let users do
    else:
        os.mkfifo(tree / "pipe")
        os.chown(tree / "pipe", MALLORY, MALLORY)
    os.chown(tree, MALLORY, MALLORY)
    with pytest.raises(TreeRefused, match=r"who did not make it|neither a file"):
        disk.close_for_others(tree, made_by=MALLORY)
    assert outside.stat().st_mode & 0o7777 == 0o600
