"""Which build it is: the commit of a wheel, of a checkout and of a further work tree, or none."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common import build_identity
from tests.kit.places import ROOT

COMMIT, OTHER = "1" * 40, "2" * 40


def checkout(folder: Path, files: dict[str, str]) -> Path:
    git = folder / ".git"
    for name, text in files.items():
        path = git / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return git


@pytest.mark.parametrize(
    "files",
    [
        {"HEAD": f"{COMMIT}\n"},
        {"HEAD": "ref: refs/heads/main\n", "refs/heads/main": f"{COMMIT}\n"},
        {
            "HEAD": "ref: refs/heads/main\n",
            "packed-refs": f"# pack-refs\n{OTHER} refs/heads/a\n{COMMIT} refs/heads/main\n",
        },
    ],
    ids=["detached", "branch", "packed"],
)
def test_commit_is_that_of_the_checkout(tmp_path: Path, files: dict[str, str]) -> None:
    assert build_identity.commit(tmp_path / "none", checkout(tmp_path, files)) == COMMIT


def test_commit_is_that_of_a_further_work_tree(tmp_path: Path) -> None:
    git = checkout(
        tmp_path,
        {
            "HEAD": f"{OTHER}\n",
            "refs/heads/side": f"{COMMIT}\n",
            "worktrees/side/HEAD": "ref: refs/heads/side\n",
            "worktrees/side/commondir": "../..\n",
        },
    )
    pointer = tmp_path / "side.git"
    pointer.write_text(f"gitdir: {git / 'worktrees' / 'side'}\n")
    assert build_identity.commit(tmp_path / "none", pointer) == COMMIT


def test_commit_of_the_wheel_comes_first(tmp_path: Path) -> None:
    (tmp_path / "commit.txt").write_text(f"{COMMIT}\n")
    git = checkout(tmp_path, {"HEAD": OTHER})
    assert build_identity.commit(tmp_path / "commit.txt", git) == COMMIT


@pytest.mark.parametrize(
    "files", [{}, {"HEAD": "ref: refs/heads/none"}, {"HEAD": "\0"}, {"HEAD": "ref: ../../x"}]
)
def test_commit_is_empty_when_nothing_says_it(tmp_path: Path, files: dict[str, str]) -> None:
    assert build_identity.commit(tmp_path / "none", checkout(tmp_path, files)) == ""


def test_wheel_holds_the_commit_that_is_given_to_its_build(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=ROOT,
        env={"GPUFAAS_COMMIT": COMMIT, "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("gpufaas/parts/common/commit.txt").decode().strip() == COMMIT
