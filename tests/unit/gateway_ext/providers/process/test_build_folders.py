"""Copies of builds: complete, sealed, and bounded, whoever changes the source meanwhile."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.errors import BadDeployment, is_full_disk
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas.function_options import PATH
from gateway_ext.providers.process import builds
from gateway_ext.settings import GatewaySettings

MOST = 1 << 20
ID = FunctionId("openfaas-fn", "f")


def source(folder: Path) -> Path:
    build = folder / "source"
    build.mkdir()
    (build / "handler.py").write_text("def handle(event, context):\n    return 'hello'\n")
    return build


def copied(build: Path, folder: Path) -> Path:
    return builds.copy(build, folder, None, MOST)


def test_copy_has_all_but_what_is_ignored_and_its_name_says_the_content(tmp_path: Path) -> None:
    build = source(tmp_path)
    for name in ("__pycache__/a.pyc", ".git/HEAD", "data/b.txt", "data/deep/c.bin"):
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).write_text(name)
    (build / "run").touch(0o755)
    (build / "link").symlink_to("data/b.txt")
    first = copied(build, tmp_path)
    handler = builds.handler_of(first)
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
    assert builds.handler_of(copied(build, tmp_path)).is_dir()


def test_build_is_refused_when_a_folder_above_it_became_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    source(secret)
    (tmp_path / "allowed").symlink_to(secret)
    with pytest.raises(BadDeployment, match="was changed during the deployment"):
        copied(tmp_path / "allowed" / "source", tmp_path)


def test_full_disk_is_no_fault_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    build = source(tmp_path)
    monkeypatch.setattr("pathlib.Path.mkdir", no_room)
    with pytest.raises(OSError, match="No space left") as caught:
        copied(build, tmp_path)
    assert is_full_disk(caught.value)


# -- which folder is meant -----------------------------------------------------------------------


def handler_in(folder: Path, written_s: int) -> Path:
    folder.mkdir(parents=True)
    path = folder / "handler.py"
    path.touch()
    os.utime(path, (written_s, written_s))
    return folder


def deployed(tmp_path: Path, image: str = "f:latest", **more: Any) -> Path:
    roots = (str(tmp_path / "root"),)
    settings = GatewaySettings(builds_dir=str(tmp_path / "build"), roots=roots)
    deployment = Deployment(FunctionId("openfaas-fn", "f"), image, **more)
    return builds.find(deployment, settings)


@pytest.mark.parametrize("newer", ["build", "source"])
def test_source_is_taken_when_it_is_newer_than_its_build(tmp_path: Path, newer: str) -> None:
    folders = {
        "build": handler_in(tmp_path / "build" / "f" / "function", 2 if newer == "build" else 1),
        "source": handler_in(tmp_path / "root" / "f", 1 if newer == "build" else 2),
    }
    assert deployed(tmp_path) == folders[newer]


def test_source_is_taken_when_there_is_no_build(tmp_path: Path) -> None:
    source = handler_in(tmp_path / "root" / "f", 1)
    assert deployed(tmp_path) == source


def test_module_in_a_folder_of_the_source_makes_it_newer_and_a_cache_does_not(
    tmp_path: Path,
) -> None:
    build = handler_in(tmp_path / "build" / "f" / "function", 5)
    source = handler_in(tmp_path / "root" / "f", 1)
    handler_in(source / "__pycache__", 9)
    assert deployed(tmp_path) == build
    handler_in(source / "parts", 9)
    assert deployed(tmp_path) == source


@pytest.mark.parametrize("other", ["build/f/function", "root/f"])
def test_folder_of_the_image_is_taken_when_one_of_the_function_is_newer(
    tmp_path: Path, other: str
) -> None:
    meant = handler_in(tmp_path / "root" / "f-v2", 1)
    handler_in(tmp_path / other, 9)
    assert deployed(tmp_path, image="reg/f-v2:latest") == meant
    assert deployed(tmp_path, image="reg/none:latest") == tmp_path / other


def test_folder_that_a_deployment_names_is_taken_whatever_else_there_is(tmp_path: Path) -> None:
    handler_in(tmp_path / "build" / "f" / "function", 5)
    named = handler_in(tmp_path / "root" / "named", 1)
    assert deployed(tmp_path, annotations={"com.gpufaas.path": "named"}) == named


def test_refusal_says_that_no_fprocess_is_run(tmp_path: Path) -> None:
    with pytest.raises(BadDeployment, match="fprocess is not run here"):
        deployed(tmp_path, process="python index.py")
    with pytest.raises(BadDeployment, match=r"there is no build of f\.openfaas-fn"):
        deployed(tmp_path)


def test_refusal_does_not_tell_whether_a_handler_is_outside(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    source(outside)
    (root / "function").symlink_to(outside / "source")
    (root / "link").symlink_to(outside / "source")
    (root / "circle").symlink_to("circle")
    names = [outside / "source", outside / "nothing", root, "link", "circle", "../outside/source"]
    assert {refusal(root, str(name)) for name in names} == {refusal(root, "nothing")}


@pytest.mark.parametrize(
    "name", ["a\0b", "a" * 5000, "a/" * 5000, "a\nb", "\udcff", "/proc/self/mem"]
)
def test_path_that_is_none_is_refused_as_any_other(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path, name) == refusal(tmp_path, "nothing")
    assert refusal(tmp_path, image=name) == refusal(tmp_path, image="nothing")


def refusal(root: Path, path: str = "", image: str = "i") -> str:
    """What is said about a path or an image, without the text that was sent."""
    settings = GatewaySettings(builds_dir=str(root / "builds"), roots=(str(root),))
    named = {PATH: path} if path else {}
    with pytest.raises(BadDeployment) as refused:
        builds.find(Deployment(ID, image, annotations=named), settings)
    text = str(refused.value)
    assert text.isprintable()
    assert len(text) < 1500
    before, looked, after = text.partition("; looked at ")
    assert looked
    return before.partition("(image")[0] + after.partition(": handler.py")[2]
