"""Copies of builds: complete, sealed, and bounded, whoever changes the source meanwhile."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway_ext.errors import BadDeployment
from gateway_ext.providers.process import build_folders

MOST = 1 << 20


def source(folder: Path) -> Path:
    build = folder / "source"
    build.mkdir()
    (build / "handler.py").write_text("def handle(event, context):\n    return 'hello'\n")
    return build


def copied(build: Path, folder: Path) -> Path:
    return build_folders.copy(build, folder, None, MOST)


def test_copy_has_all_but_what_is_ignored_and_its_name_says_the_content(tmp_path: Path) -> None:
    build = source(tmp_path)
    for name in ("__pycache__/a.pyc", ".git/HEAD", "data/b.txt", "data/deep/c.bin"):
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).write_text(name)
    (build / "run").touch(0o755)
    (build / "link").symlink_to("data/b.txt")
    first = copied(build, tmp_path)
    handler = build_folders.handler_of(first)
    names = {str(path.relative_to(handler)) for path in handler.rglob("*")}
    assert names == {
        "handler.py",
        "data",
        "data/b.txt",
        "data/deep",
        "data/deep/c.bin",
        "run",
        "link",
    }
    assert (handler / "link").read_text() == "data/b.txt"
    assert (handler / "run").stat().st_mode & 0o7777 == 0o750
    assert (handler / "handler.py").stat().st_mode & 0o7777 == 0o640
    assert copied(build, tmp_path) == first
    (build / "data" / "b.txt").write_text("changed")
    assert copied(build, tmp_path) != first


def _deep(build: Path) -> None:
    here = os.open(build, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def _large(build: Path) -> None:
    (build / "weights").write_bytes(bytes(MOST + 1))


def _many_large(build: Path) -> None:
    for number in range(3):
        (build / str(number)).write_bytes(bytes(MOST // 2))


def _requirements(build: Path) -> None:
    (build / "requirements.txt").write_bytes(b"#" * (MOST + 1))


def _linked_requirements(build: Path) -> None:
    (build / "requirements.txt").symlink_to("/etc/passwd")


def _pipe(build: Path) -> None:
    os.mkfifo(build / "pipe")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_deep, "levels of folders"),
        (_large, "weights is too large"),
        (_many_large, "2 is too large"),
        (_requirements, "too large|1048576 bytes are the most"),
        (_linked_requirements, "a link that leaves the build"),
        (_pipe, "neither a file nor a folder"),
    ],
)
def test_build_is_refused_when_it_cannot_be_copied(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    build = source(tmp_path)
    spoil(build)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(BadDeployment, match=why):
        copied(build, into)
    assert list(into.iterdir()) == []


def test_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    build = source(tmp_path)
    (build / "a").symlink_to("b")
    (build / "b").symlink_to("a")
    assert build_folders.handler_of(copied(build, tmp_path)).is_dir()


def test_build_is_refused_when_a_folder_above_it_became_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    source(secret)
    (tmp_path / "allowed").symlink_to(secret)
    with pytest.raises(BadDeployment, match="was changed during the deployment"):
        copied(tmp_path / "allowed" / "source", tmp_path)
